"""Extract in plain torch: what every faster form is tested against."""

from __future__ import annotations

import torch

from inferscale_mem.kernels.quantise import Stored, keep
from inferscale_mem.kernels.rope import reference as rope


def extract(
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
    """Keep tokens of one layer's paged cache, keys as they were before they were rotated by (cos, sin).

    Args:
        keys: [R, H, D]; its ``rows`` are overwritten. In fewer bits only if each row has scales of its own.
        values: likewise.
        For the rest, see ``kernels.inject.reference``; the cache is only read.
    """
    at = blocks[:, None, None]
    undone = rope.rotate(cache[at, key_places[offsets]], *rope.inverse(cos, sin), is_neox_style)
    keep(keys, rows, undone)
    keep(values, rows, cache[at, value_places[offsets]])
