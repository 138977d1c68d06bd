"""Whether the chat model and the embedder can be opened, and the handle key read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from inferscale_mem.cli.doctor.finding import Finding
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import InferScaleError
from inferscale_mem.handle_key import KEY_FILE, load_key
from inferscale_mem.models import (
    converted_folder,
    is_packaged,
    model_damage,
    packaged_chat_model,
    resolve_embedder,
    resolve_model,
)


def check_model(config: InferScaleConfig) -> Finding:
    """The configured model, or every byte of the packaged one. Converts nothing."""
    try:
        if is_packaged(config):
            return _check_packaged(config)
        model = resolve_model(config)
        if not _has_template(model):
            return Finding("model", "fail", f"{model} has no chat template", "Use a chat (instruct) model.")
        return Finding("model", "ok", model)
    except InferScaleError as error:
        return Finding("model", "fail", _first_sentence(error), _rest(error))


def _has_template(model: str) -> bool:
    """Whether a model's folder has a chat template; ids of a hub are not looked into."""
    folder = Path(model)
    if not folder.is_dir() or any(folder.glob("chat_template.*")) or (folder / "additional_chat_templates").is_dir():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def check_embedder(config: InferScaleConfig) -> Finding:
    """The configured embedder, or the packaged one."""
    try:
        return Finding("embedder", "ok", resolve_embedder(config))
    except InferScaleError as error:
        return Finding("embedder", "fail", _first_sentence(error), _rest(error))


def check_key(config: InferScaleConfig) -> Finding:
    """The key that signs handles. Makes none."""
    if config.handle_key is not None:
        return Finding("handle key", "ok", "from the settings")
    if not (config.home / KEY_FILE).exists():
        return Finding("handle key", "ok", f"{config.home / KEY_FILE} (made on first use)")
    try:
        load_key(config)
    except InferScaleError as error:
        return Finding("handle key", "fail", _first_sentence(error), _rest(error))
    return Finding("handle key", "ok", str(config.home / KEY_FILE))


def _check_packaged(config: InferScaleConfig) -> Finding:
    source = packaged_chat_model()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    folder = converted_folder(config)
    if not folder.exists():
        if missing:
            detail = f"{missing[0]} is not installed, which converts {source.name}"
            return Finding("model", "fail", detail, "pip install gguf accelerate")
        return Finding("model", "ok", f"{source.name}, packaged (converted on first use, up to a minute)")
    broken = model_damage(config)
    if broken is None:
        return Finding("model", "ok", f"{folder}, every byte as converted")
    return Finding("model", "warn", f"{folder}: {broken}", "It is converted again on next use.")


def _first_sentence(error: InferScaleError) -> str:
    return str(error).partition(". ")[0].rstrip(".")


def _rest(error: InferScaleError) -> str:
    return str(error).partition(". ")[2]
