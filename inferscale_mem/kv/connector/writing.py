"""From the slab to the paged cache: rows of records, keys rotated to their positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from vllm import _custom_ops as ops

from inferscale_mem.kernels.inject.layout import find_layout
from inferscale_mem.kernels.paged import Step
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.paging import alike, paged_caches, tune
from inferscale_mem.kv.connector.tokens import NULL_BLOCK, StepTokens
from inferscale_mem.kv.rope import RopeTable, kernel_rounds, rotate
from inferscale_mem.kv.slab import Scratch, Slab

if TYPE_CHECKING:
    from inferscale_mem.kernels.inject.cpu import Injector
    from inferscale_mem.kernels.inject.fused import Injector as FusedInjector

ONE_PASS = (torch.bfloat16, torch.float32)
"""Data types of paged caches on a CPU that ``OnePassWriter`` writes."""


class Writer(Protocol):
    """Writes to some layers of one KV cache group."""

    group: int
    block_size: int

    def write(self, tokens: StepTokens) -> None:
        """Write rows of the slab to their slots of the paged cache, rotated to their positions."""


def make_writers(layers: Sequence[CachedLayer], slab: Slab) -> list[Writer]:
    """Writers for all layers of a slab, in one pass over the data where a kernel knows the cache's layout.

    Args:
        layers: in the slab's order.
        slab: theirs.
    """
    scratch = Scratch(*slab.shape[2:], slab.row_dtype, slab.device)
    writers = []
    for indices in alike(layers):
        some = [layers[index] for index in indices]
        kernel = _one_pass if slab.device.type == "cpu" else make_fused
        writers.append(kernel(indices, some, slab) or BackendWriter(indices, some, slab, scratch))
    return writers


class BackendWriter:
    """Layer by layer through the backend's own write, so that it works with any cache."""

    def __init__(self, indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab, scratch: Scratch) -> None:
        self.group, self.block_size = layers[0].group, layers[0].block_size
        self._layers = list(zip(indices, layers, strict=True))
        self._slab, self._scratch = slab, scratch

    def write(self, tokens: StepTokens) -> None:
        """See Writer."""
        rows, positions, slots = tokens.slots(self.group, self.block_size, self._slab.device)
        # Layer by layer, so that rows stay in the processor's cache from the slab to the paged cache.
        keys, values = self._scratch.take(len(rows))
        for index, layer in self._layers:
            self._slab.read(index, rows, keys, values)
            if layer.rope is not None:
                _rotate_in_place(keys, positions, layer.rope)
            layer.write(keys.to(self._slab.dtype), values.to(self._slab.dtype), slots)


class OnePassWriter:
    """All layers by one kernel, on a CPU."""

    def __init__(self, layer: CachedLayer, injector: Injector) -> None:
        self.group, self.block_size = layer.group, layer.block_size
        self._rope, self._inject = layer.rope, injector

    def write(self, tokens: StepTokens) -> None:
        """See Writer."""
        rows, positions, slots = tokens.slots(self.group, self.block_size, torch.device("cpu"))
        if self._rope is None:
            cos = sin = torch.empty(len(rows), 0)
        else:
            cos, sin = self._rope.at(positions)
        neox = self._rope is None or self._rope.is_neox_style
        self._inject(rows, slots // self.block_size, slots % self.block_size, cos, sin, neox)


class FusedWriter:
    """All layers in one launch of a Triton kernel, which looks slots up itself; the host waits for nothing."""

    def __init__(self, layer: CachedLayer, injector: FusedInjector, device: torch.device) -> None:
        self.group, self.block_size = layer.group, layer.block_size
        self._device, self._inject = device, injector
        self._neox = layer.rope is None or layer.rope.is_neox_style
        self._angles = torch.empty(1, 0, device=device) if layer.rope is None else layer.rope.cos_sin_cache

    def write(self, tokens: StepTokens) -> None:
        """See Writer."""
        self.write_step(tokens.step(self.group, self._device))

    def write_step(self, step: Step) -> None:
        """Write rows to slots; ``step`` is on the device."""
        self._inject(step, self._angles, self._neox, NULL_BLOCK)


def make_fused(indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab) -> FusedWriter | None:
    """A writer for layers that are alike; tunes its kernel, which takes some seconds the first time. See ``tune``.

    Args:
        indices: of the layers within the slab.
        layers: theirs; nothing is in their caches yet, nor in the slab.
        slab: theirs.

    Returns:
        None: no Triton, or a cache that is not packed as its shape says; the backend's own write can do it.
    """
    caches = paged_caches(layers)
    if caches is None:
        return None
    from inferscale_mem.kernels.inject.fused import Injector as FusedInjector  # only now: a CPU needs no Triton

    injector = FusedInjector(slab.keys, slab.values, indices, caches)
    writer = FusedWriter(layers[0], injector, slab.device)
    tune(writer.write_step, layers[0], slab)
    return writer


def _one_pass(indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab) -> Writer | None:
    """None: no kernel for this device, data type or layout."""
    caches = [layer.module.kv_cache for layer in layers]
    if not all(cache.is_contiguous() and cache.dtype == slab.dtype in ONE_PASS for cache in caches):
        return None
    key_layout, value_layout = (find_layout(places) for places in (layers[0].packing.keys, layers[0].packing.values))
    if key_layout is None or value_layout is None:
        return None
    # Only now: numba is for CPUs, and vLLM 0.32 cannot start a worker in a process that has it loaded.
    from inferscale_mem.kernels.inject.cpu import CACHE_LINE, FORMS_OF, Injector

    if any(cache.data_ptr() % CACHE_LINE for cache in caches):
        return None
    if {key_layout.form, value_layout.form} - set(FORMS_OF[slab.dtype]):
        return None
    injector = Injector(slab.keys, slab.values, indices, caches, key_layout, value_layout, torch.get_num_threads())
    return OnePassWriter(layers[0], injector)


def _rotate_in_place(keys: torch.Tensor, positions: torch.Tensor, rope: RopeTable) -> None:
    """``rotate`` by the engine's own kernel where that can do it; positions are those of a prompt, so they fit."""
    if keys.dtype == rope.dtype and rope.kernel_safe and _kernel_will_do(keys.dtype, keys.device):
        ops.rotary_embedding(positions, keys.flatten(1), None, keys.shape[-1], rope.cos_sin_cache, rope.is_neox_style)
    else:
        rotate(keys, positions, rope, out=keys)


@functools.cache
def _kernel_will_do(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 or kernel_rounds(ops.rotary_embedding, dtype, device)
