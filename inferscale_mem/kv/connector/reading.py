"""From the paged cache to the slab: tokens that were computed, the rotation of their keys undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from inferscale_mem.kernels.paged import Step
from inferscale_mem.kernels.rope.reference import inverse
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.paging import alike, paged_caches, tune
from inferscale_mem.kv.connector.tokens import NULL_BLOCK, StepTokens
from inferscale_mem.kv.rope import unrotate
from inferscale_mem.kv.slab import Slab

if TYPE_CHECKING:
    from inferscale_mem.kernels.extract.fused import Extractor


class Reader(Protocol):
    """Reads some layers of one KV cache group."""

    def read(self, tokens: StepTokens) -> None:
        """Keep tokens of the paged cache in their rows of the slab, keys as they were before RoPE."""


def make_readers(layers: Sequence[CachedLayer], slab: Slab) -> list[Reader]:
    """Readers for all layers of a slab: one kernel for all that are alike, on a GPU.

    Args:
        layers: in the slab's order.
        slab: theirs.
    """
    readers: list[Reader] = []
    for indices in alike(layers):
        some = [layers[index] for index in indices]
        fused = None if slab.device.type == "cpu" else make_fused_reader(indices, some, slab)
        readers.append(fused or PackingReader(indices, some, slab))
    return readers


class PackingReader:
    """Layer by layer, by what was learned of the packing."""

    def __init__(self, indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab) -> None:
        self._layers, self._slab = list(zip(indices, layers, strict=True)), slab

    def read(self, tokens: StepTokens) -> None:
        """See Reader."""
        for index, layer in self._layers:
            rows, positions, slots = tokens.slots(layer.group, layer.block_size, self._slab.device)
            keys, values = layer.read(slots)
            if layer.rope is not None:
                keys = unrotate(keys, positions, layer.rope, dtype=self._slab.row_dtype)
            self._slab.write(index, rows, keys, values)


class FusedReader:
    """All layers in one launch of a Triton kernel; the host waits for nothing."""

    def __init__(self, layer: CachedLayer, extractor: Extractor, device: torch.device) -> None:
        self._group, self._rope = layer.group, layer.rope
        self._extract, self._device = extractor, device

    def read(self, tokens: StepTokens) -> None:
        """See Reader."""
        self.read_step(tokens.step(self._group, self._device))

    def read_step(self, step: Step) -> None:
        """Keep tokens; ``step`` is on the device."""
        if self._rope is None:
            undo = torch.empty(step.num_tokens, 0, device=self._device)
        else:
            undo = torch.cat(inverse(*self._rope.at(step.positions)), dim=1)
        self._extract(step, undo, self._rope is None or self._rope.is_neox_style, NULL_BLOCK)


def make_fused_reader(indices: Sequence[int], layers: Sequence[CachedLayer], slab: Slab) -> FusedReader | None:
    """A reader for layers that are alike; tunes its kernel, which takes some seconds the first time. See ``tune``.

    Args:
        indices: of the layers within the slab.
        layers: theirs; nothing is in their caches yet, nor in the slab.
        slab: theirs.

    Returns:
        None: no Triton, or a cache that is not packed as its shape says.
    """
    caches = paged_caches(layers)
    if caches is None:
        return None
    from inferscale_mem.kernels.extract.fused import Extractor  # only now: a CPU needs no Triton

    reader = FusedReader(layers[0], Extractor(slab.keys, slab.values, indices, caches), slab.device)
    tune(reader.read_step, layers[0], slab)
    return reader
