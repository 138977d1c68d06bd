"""Which rotation each layer really applies to its keys, found out by a probe.

In a prompt that repeats one token, all positions carry the same values, so attention returns the same vector everywhere
whatever its weights, and by induction over the layers the keys before RoPE are the same at all positions. So the right
rotation is the one that, undone, makes a layer's keys constant. A layer that has a rotary module and never calls it, or
a wrong table, shows here, where encoding and injecting at the same positions would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferscale_mem.engines.hf.cache import RecordingCache
from inferscale_mem.errors import UnsupportedModelError
from inferscale_mem.kv.rope import RopeTable, unrotate

TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far un-rotated pairs of channels may be from constant, relative to their length. SmolLM2 has 1e-4 in float32 and
0.007 in bfloat16; no rotation at all, or a base that is off by a fifth, has 2 and more."""
FLOOR = 1e-3
"""Pairs shorter than this part of the median are rounding noise, and count as if they had this length."""


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


def deviation(keys: torch.Tensor, positions: torch.Tensor, table: RopeTable | None) -> float:
    """How far keys [T, H, D] are from constant once un-rotated: the worst pair of channels, relative to its length.

    Pair by pair, because a few channels of hardly any rotation can be a hundred times larger than all others.
    """
    plain = unrotate(keys, positions, table, dtype=torch.float32)
    size = _pair_lengths(plain, table).mean(dim=0)
    off = _pair_lengths(plain - plain[:1], table).amax(dim=0)
    return float((off / size.clamp_min(FLOOR * float(size.median()) + 1e-30)).max())


def _pair_lengths(keys: torch.Tensor, table: RopeTable | None) -> torch.Tensor:
    """Lengths of what is rotated together: pairs, then channels that are not rotated."""
    if table is None:
        return keys.abs()
    turned, rest = keys[..., : table.rotary_dim], keys[..., table.rotary_dim :]
    halves = turned.chunk(2, dim=-1) if table.is_neox_style else (turned[..., 0::2], turned[..., 1::2])
    pairs = torch.hypot(*halves)
    return torch.cat((pairs, rest.abs()), dim=-1)


def choose(keys: torch.Tensor, positions: torch.Tensor, tables: Sequence[Candidate]) -> tuple[Candidate, float]:
    """The rotation that explains a layer's keys best, and how far off it is."""
    fitting = [c for c in tables if c.table is None or c.table.rotary_dim <= keys.shape[-1]]
    return min(((c, deviation(keys, positions, c.table)) for c in fitting), key=lambda pair: pair[1])
