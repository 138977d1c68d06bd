"""From the slab to the paged cache: rows of records, keys rotated to their positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from vllm import _custom_ops as ops

from inferscale_mem.kernels.inject.layout import find_layout
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.rope import RopeTable, rotate
from inferscale_mem.kv.slab import Scratch, Slab

if TYPE_CHECKING:
    from inferscale_mem.kernels.inject.cpu import Injector


class Writer(Protocol):
    """Writes to some layers of one KV cache group."""

    group: int
    block_size: int

    def write(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [T] of the slab to slots [T] of the paged cache, rotated to positions [T]; all int64."""


def make_writers(layers: Sequence[CachedLayer], slab: Slab) -> list[Writer]:
    """Writers for all layers of a slab, in one pass over the data where a kernel knows the cache's layout.

    Args:
        layers: in the slab's order.
        slab: theirs.
    """
    alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        alike[layer.group, id(layer.rope), id(layer.packing)].append(index)
    scratch = Scratch(slab.keys.shape[2], slab.keys.shape[3], slab.keys.dtype, slab.keys.device)
    writers = []
    for indices in alike.values():
        some = [layers[index] for index in indices]
        writers.append(_one_pass(indices, some, slab) or BackendWriter(indices, some, slab, scratch))
    return writers


class BackendWriter:
    """Layer by layer through the backend's own write, so that it works with any cache."""

    def __init__(self, indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab, scratch: Scratch) -> None:
        self.group, self.block_size = layers[0].group, layers[0].block_size
        self._layers = list(zip(indices, layers, strict=True))
        self._slab, self._scratch = slab, scratch

    def write(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """See Writer."""
        # Layer by layer, so that rows stay in the processor's cache from the slab to the paged cache.
        keys, values = self._scratch.take(len(rows))
        for index, layer in self._layers:
            self._slab.read(index, rows, keys, values)
            if layer.rope is not None:
                _rotate_in_place(keys, positions, layer.rope)
            layer.write(keys, values, slots)


class OnePassWriter:
    """All layers by one kernel, on a CPU."""

    def __init__(self, layer: CachedLayer, injector: Injector) -> None:
        self.group, self.block_size = layer.group, layer.block_size
        self._rope, self._inject = layer.rope, injector

    def write(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """See Writer."""
        if self._rope is None:
            cos = sin = torch.empty(len(rows), 0)
        else:
            cos, sin = self._rope.at(positions)
        neox = self._rope is None or self._rope.is_neox_style
        self._inject(rows, slots // self.block_size, slots % self.block_size, cos, sin, neox)


def _one_pass(indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab) -> Writer | None:
    """None: no kernel for this device, data type or layout."""
    caches = [layer.module.kv_cache for layer in layers]
    if slab.keys.device.type != "cpu" or slab.keys.dtype != torch.bfloat16:
        return None
    if not all(cache.is_contiguous() and cache.dtype == torch.bfloat16 for cache in caches):
        return None
    key_layout, value_layout = (find_layout(places) for places in (layers[0].packing.keys, layers[0].packing.values))
    if key_layout is None or value_layout is None:
        return None
    # Only now: numba is for CPUs, and vLLM 0.32 cannot start a worker in a process that has it loaded.
    from inferscale_mem.kernels.inject.cpu import CACHE_LINE, Injector

    if any(cache.data_ptr() % CACHE_LINE for cache in caches):
        return None
    injector = Injector(slab.keys, slab.values, indices, caches, key_layout, value_layout, torch.get_num_threads())
    return OnePassWriter(layers[0], injector)


def _rotate_in_place(keys: torch.Tensor, positions: torch.Tensor, rope: RopeTable) -> None:
    """``rotate`` by the engine's own kernel where that can do it; positions are those of a prompt, so they fit."""
    if keys.dtype == rope.dtype and rope.kernel_safe:
        ops.rotary_embedding(positions, keys.flatten(1), None, keys.shape[-1], rope.cos_sin_cache, rope.is_neox_style)
    else:
        rotate(keys, positions, rope, out=keys)
