"""Which rotation each layer really applies to its keys: the one that, undone, passes ``kv/rope_probe.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferscale_mem.engines.hf.cache import RecordingCache
from inferscale_mem.errors import UnsupportedModelError
from inferscale_mem.kv.rope import RopeTable, unrotate
from inferscale_mem.kv.rope_probe import deviation


@dataclass(frozen=True)
class Candidate:
    """A rotation that layers may turn out to use; ``table`` is None for none at all."""

    name: str
    table: RopeTable | None


def candidates(model: torch.nn.Module, dtype: torch.dtype, max_model_len: int) -> tuple[list[Candidate], list[str]]:
    """Every rotation the model's modules hold, and why some cannot be used."""
    found = [Candidate("no rotation", None)]
    refused: list[str] = []
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("RotaryEmbedding"):
            continue
        kinds = getattr(module, "rope_type", None)
        for layer_type in sorted(kinds) if isinstance(kinds, dict) else [None]:
            try:
                table = RopeTable.from_module(module, dtype=dtype, max_positions=max_model_len, layer_type=layer_type)
            except UnsupportedModelError as error:
                refused.extend(error.reasons)
            else:
                found.append(Candidate(f"{name} {layer_type or ''}".strip(), table))
    return found, refused


def probe(model: Any, config: Any, token: int, max_model_len: int) -> tuple[RecordingCache, torch.Tensor]:
    """One pass over a token repeated at positions up to the last; returns what was recorded, and the positions [T]."""
    spread = {round(max_model_len ** (i / 24)) - 1 for i in range(25)}
    positions = torch.tensor(sorted({*range(min(16, max_model_len)), *spread}), device=model.device)
    cache = RecordingCache(config, record=True)
    ids = torch.full((1, len(positions)), token, device=model.device)
    model(input_ids=ids, position_ids=positions[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, positions


def choose(keys: torch.Tensor, positions: torch.Tensor, tables: Sequence[Candidate]) -> tuple[Candidate, float]:
    """The rotation that explains a layer's keys best, and how far off it is."""
    fitting = [c for c in tables if c.table is None or c.table.rotary_dim <= keys.shape[-1]]
    plain = ((c, unrotate(keys, positions, c.table, dtype=torch.float32)) for c in fitting)
    return min(((c, deviation(k, c.table, keys.dtype)) for c, k in plain), key=lambda pair: pair[1])
