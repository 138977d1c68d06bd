"""Whether a rotation that was undone is the one the model does.

In a prompt that repeats one token, all positions carry the same values, so attention returns the same vector
everywhere whatever its weights, and by induction over the layers the keys before RoPE are the same at all positions. A
layer that has a rotary module and never calls it, or a wrong table, shows as keys that are not, where encoding and
injecting at the same positions would hide it.
"""

from __future__ import annotations

import torch

from inferscale_mem.kv.rope import RopeTable

TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far pairs of channels may be from constant, relative to their length. SmolLM2 has 1e-4 in float32 and up to 0.02
in bfloat16, on processors without bfloat16 instructions; no rotation at all has 2, a base that is off by a fifth 1.7,
by a fiftieth 0.2."""
FLOOR = 1e-3
"""Pairs shorter than this part of the median are rounding noise, and count as if they had this length."""
STRETCHES = 24
"""Positions are averaged over so many stretches: rounding averages out, a rotation does not."""
NEIGHBOURS = 5
"""Pairs whose median counts in 16 bits: a wrong rotation turns neighbours alike, rounding hits the short ones."""


def deviation(keys: torch.Tensor, table: RopeTable | None, computed: torch.dtype) -> float:
    """How far keys are from constant: the worst pair of channels, or few neighbouring ones, relative to their length.

    Pair by pair, because a few channels of hardly any rotation can be a hundred times larger than all others.

    Args:
        keys: before RoPE (un-rotated), of one token at T positions, [T, H, D], any float dtype.
        table: what was undone; None for a layer without RoPE.
        computed: dtype in which the model computes; in float32 every pair counts.
    """
    plain = keys.float()
    length = _pair_lengths(plain, table).mean(dim=0)
    means = torch.stack([part.mean(dim=0) for part in plain.tensor_split(min(STRETCHES, len(plain)))])
    moved = _pair_lengths(means - means[:1], table).amax(dim=0)
    shrunk = (length - _pair_lengths(means, table)).amax(dim=0)  # what goes round within a stretch averages to nothing
    off = torch.maximum(moved, shrunk) / length.clamp_min(FLOOR * float(length.median()) + 1e-30)
    if computed == torch.float32:
        return float(off.max())
    size = min(NEIGHBOURS, off.shape[-1])
    return float(off.unfold(-1, size, 1).movedim(0, -1).flatten(-2).median(dim=-1).values.max())


def _pair_lengths(keys: torch.Tensor, table: RopeTable | None) -> torch.Tensor:
    """Lengths of what is rotated together: pairs, then channels that are not rotated."""
    if table is None:
        return keys.abs()
    turned, rest = keys[..., : table.rotary_dim], keys[..., table.rotary_dim :]
    halves = turned.chunk(2, dim=-1) if table.is_neox_style else (turned[..., 0::2], turned[..., 1::2])
    return torch.cat((torch.hypot(*halves), rest.abs()), dim=-1)
