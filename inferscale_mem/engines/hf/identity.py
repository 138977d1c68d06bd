"""What changes when a model's KV state would: a hash over the model's files and how it is run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers.utils.hub import cached_file

from inferscale_mem.errors import ModelError

SAMPLE = 1 << 16
SAMPLES = 16


def fingerprint(model: str, *parts: str) -> str:
    """20 hex digits over a model's configuration, its weight files' names, sizes and samples of their bytes, and parts.

    Args:
        model: Hugging Face id or local folder of a model that has been loaded from there.
        parts: whatever else changes KV state, such as dtype and engine kind.

    Raises:
        ModelError: no weight files.
    """
    config = cached_file(model, "config.json")
    folder = Path(str(config)).parent
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not weights:
        raise ModelError(f"No weight files beside {config}.")
    digest = hashlib.sha256()
    for part in (*parts, Path(str(config)).read_text("utf-8")):
        digest.update(part.encode() + b"\0")
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size}".encode() + b"\0")
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()[:20]


def _samples(file: Path) -> list[bytes]:
    """Bytes from all over a file: reading gigabytes at every start would be too slow."""
    step = max(SAMPLE, file.stat().st_size // SAMPLES)
    found = []
    with file.open("rb") as stream:
        for start in range(0, file.stat().st_size, step):
            stream.seek(start)
            found.append(stream.read(SAMPLE))
    return found
