"""The packaged SmolLM2-135M-Instruct, from its 4-bit GGUF file to a folder of bf16 safetensors that engines open.

The heavy half of this package: importing this loads torch and transformers.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    TokenizersBackend,
)

from inferscale_mem.errors import MissingDependencyError, ModelError
from inferscale_mem.models import CHAT_PACKAGE, say
from inferscale_mem.models.checksums import Manifest, damage
from inferscale_mem.models.loading import LOADING
from inferscale_mem.private_files import make_private_folder

_END_OF_TURN, _END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
_CONTEXT = 8192


def convert_once(gguf: Path, folder: Path, source: Mapping[str, Any]) -> None:
    """Make ``folder`` from ``gguf``, unless another process has just done so; replaces a broken one.

    The folder appears whole or not at all. ``source`` goes into its manifest.

    Raises:
        ModelError: the folder cannot be written, or the file cannot be read as a model.
        MissingDependencyError: the GGUF reader is not installed.
    """
    try:
        make_private_folder(folder.parent)  # the first of these may be the home of memories
        lock = FileLock(folder.with_suffix(".lock"))
        with _held(lock):
            if damage(folder, source) is None:
                return
            _convert(gguf, folder, source)
    except OSError as error:
        raise ModelError(
            f"The packaged model cannot be written to {folder}: {error}. It needs about 300 MB; free some space or set "
            "INFERSCALE_HOME to a folder that can be written."
        ) from error


def _held(lock: FileLock) -> FileLock:
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        say("Another process is converting the packaged model; waiting for it.")
        lock.acquire()
    return lock


def _convert(gguf: Path, folder: Path, source: Mapping[str, Any]) -> None:
    say(f"Converting the packaged SmolLM2-135M-Instruct into {folder} (once; seconds to two minutes).")
    start = time.monotonic()
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # libraries' progress bars; errors are raised, not printed
            save(gguf, draft)
        _open_to_readers(draft)
        Manifest.of(draft, source).write(draft)
        old = draft.with_name(draft.name + ".old")
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    say(f"Converted in {time.monotonic() - start:.0f} s.")


def save(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer, chat template and generation defaults of a GGUF file into an existing folder.

    Raises:
        ModelError: the file cannot be read as a model.
        MissingDependencyError: the GGUF reader is not installed.
    """
    try:
        tokenizer = _tokenizer(gguf)
        model = weights_of(gguf)
    except ImportError as error:
        raise MissingDependencyError("gguf", "cpu", hint="pip install gguf accelerate is enough, too.") from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{gguf} cannot be read as a model: {error}. Install {CHAT_PACKAGE} again.") from error
    model.generation_config = _chat_defaults(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def weights_of(gguf: Path) -> PreTrainedModel:
    """A GGUF file's model, in plain bf16."""
    with LOADING:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
    # The weights are plain bf16 now; what is left of the GGUF would make a reader look for quantised ones.
    model.config.__dict__.pop("quantization_config", None)
    model.config.__dict__.pop("_model_name_or_path", None)
    model.__dict__.pop("hf_quantizer", None)
    return model


def _tokenizer(gguf: Path) -> TokenizersBackend:
    tokenizer = AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True, model_max_length=_CONTEXT
    )
    if not isinstance(tokenizer, TokenizersBackend):
        raise ModelError(f"transformers made {type(tokenizer).__name__} of {gguf}; use a tested version of it.")
    # GGUF names this splitting ("smollm": every digit alone), but the converter knows only GPT-2's, which tokenises
    # spaces in front of numbers in a way the model was not trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for name in ("name_or_path", "vocab_file", "is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def _chat_defaults(tokenizer: TokenizersBackend) -> GenerationConfig:
    """Stop at the end of a turn, and sample as the model's makers recommend."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in (_END_OF_TURN, _END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.2,
        top_p=0.9,
    )


def _open_to_readers(folder: Path) -> None:
    """Drop the private mode of temporary folders and of safetensors' files: others may read a model."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
