"""Inject in plain torch: what every faster form is tested against."""

from __future__ import annotations

import torch

from inferscale_mem.kernels.quantise import Stored, dequantise
from inferscale_mem.kernels.rope import reference as rope


def inject(
    keys: Stored,
    values: Stored,
    rows: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
    cache: torch.Tensor,
    key_places: torch.Tensor,
    value_places: torch.Tensor,
) -> None:
    """Write rows of one layer into its paged cache, keys rotated.

    Args:
        keys: before RoPE, [R, H, D]; all rows of a layer, as floats or in fewer bits.
        values: likewise.
        rows: [T] int64, the rows to write.
        blocks: [T] int64, the block of each.
        offsets: [T] int64, its place in the block.
        cos: [T, rotary_dim // 2] float32, of each one's position.
        sin: likewise.
        is_neox_style: see ``kernels.rope``.
        cache: [num_blocks, block elements], contiguous; changed.
        key_places: [block_size, H, D] int64: where a block keeps each element of its keys.
        value_places: likewise.
    """
    at = blocks[:, None, None]
    turned = rope.rotate(dequantise(keys, rows), cos, sin, is_neox_style)
    cache[at, key_places[offsets]] = turned.to(cache.dtype)
    cache[at, value_places[offsets]] = dequantise(values, rows).to(cache.dtype)
