"""Layers that one kernel can serve together, and the paged caches of such layers as kernels see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch

from inferscale_mem.kernels.paged import PagedCaches, Step
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.slab import Slab

_TUNED_BY = 1024
"""Tokens with which a kernel is tuned: some fifty facts."""


def alike(layers: Sequence[CachedLayer]) -> list[list[int]]:
    """Indices of layers that share a KV cache group, a rope and a packing."""
    found: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        found[layer.group, id(layer.rope), id(layer.packing)].append(index)
    return list(found.values())


def paged_caches(layers: Sequence[CachedLayer]) -> PagedCaches | None:
    """Caches of layers that are alike, for a Triton kernel; None: no Triton, or not packed as their shape says."""
    views = [layer.packing.views(layer.module.kv_cache) for layer in layers]
    caches = [view for view in views if view is not None]
    same = len({(keys.shape, keys.stride(), keys.dtype) for keys, _ in caches}) == 1
    if len(caches) < len(views) or not same or find_spec("triton") is None:
        return None
    return PagedCaches([keys for keys, _ in caches], [values for _, values in caches])


def tune(move: Callable[[Step], object], layer: CachedLayer, slab: Slab) -> None:
    """Have a kernel compiled and tuned before the first request: it moves zeros where nothing is yet.

    Args:
        move: runs it.
        layer: one of those it serves; their caches are empty.
        slab: theirs, empty; as many rows as are moved are filled with zeros.
    """
    num_blocks = len(layer.module.kv_cache)
    positions = _TUNED_BY if layer.rope is None else min(_TUNED_BY, layer.rope.max_positions)
    count = min(positions, slab.shape[1], (num_blocks - 1) * layer.block_size)
    slab.zero(torch.arange(count, device=slab.device))
    rows = np.arange(count)
    blocks = 1 + np.arange(-(-count // layer.block_size))  # block 0 is vLLM's null block
    move(Step(rows, rows, np.zeros_like(rows), blocks, slab.device))
