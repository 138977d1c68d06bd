"""Whether a Hugging Face id leads to a model, asked before anything is started."""

from __future__ import annotations

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from inferscale_mem.errors import ModelError


def check(name: str, *, setting: str, variable: str) -> None:
    """Make sure that the model's config.json is in the cache, or can be fetched into it.

    Raises:
        ModelError: there is no such model, it may not be read, or it is not in the cache and the hub out of reach.
    """
    what = f"{setting}={name!r}"
    try:
        hf_hub_download(name, "config.json")
    except HFValidationError as error:
        raise ModelError(f"{what} is neither a folder that exists nor a Hugging Face id such as owner/name.") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{what} asks for its licence to be accepted: do so on its page, then run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{what} is not a model on the Hugging Face hub (or a private one: run hf auth login), and no folder of "
            f"that name exists. Check the spelling; it came from {setting}= or {variable}."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{what} is not in this machine's Hugging Face cache, and the hub cannot be asked: it is out of reach, or "
            f"HF_HUB_OFFLINE is set. Go online, or fetch the model first with: hf download {name}, or give a model's "
            f"folder. With neither {setting}= nor {variable} set, the packaged small model is used."
        ) from error
    except EntryNotFoundError as error:
        raise ModelError(f"{what} has no config.json, so it is not a transformers model. Choose another.") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{what} could not be looked up on the Hugging Face hub: {error}. Try again later.") from error
