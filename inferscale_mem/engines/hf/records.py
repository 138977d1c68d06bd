"""Records in and out of a transformers cache: captured and un-rotated, rotated and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferscale_mem.config import AUTO
from inferscale_mem.engines.hf.cache import RecordingCache
from inferscale_mem.kv.directory import first_pages
from inferscale_mem.kv.rope import RopeTable, rotate, unrotate
from inferscale_mem.kv.slab import PAGE_SIZE, Slab, bytes_per_head, token_rows


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per token.

    Attributes:
        num_kv_heads: heads of keys and of values.
        head_size: elements per head.
        rope: how its keys are rotated; None if they are not.
    """

    num_kv_heads: int
    head_size: int
    rope: RopeTable | None


class RecordBytes:
    """The bytes of all records: one slab for each shape that layers have.

    Args:
        layers: of the model, in order.
        num_pages: pages of PAGE_SIZE tokens, all layers.
        dtype: of the cache.
        device: of the model.
        record_dtype: in which records are stored.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        record_dtype: str = AUTO,
    ) -> None:
        self._layers = tuple(layers)
        self._device = device
        shapes = [(layer.num_kv_heads, layer.head_size) for layer in layers]
        self._slabs = {
            shape: Slab(shapes.count(shape), num_pages, *shape, dtype, device, record_dtype)
            for shape in dict.fromkeys(shapes)
        }
        # Layer i of the model is the j-th layer of its slab.
        self._places = [(self._slabs[shape], shapes[:i].count(shape)) for i, shape in enumerate(shapes)]

    def store(self, pages: Sequence[int], start: int, end: int, cache: RecordingCache) -> None:
        """Keep tokens ``start`` to ``end`` of a prompt whose keys and values a cache has recorded."""
        rows = self._rows(pages, end - start)
        positions = torch.arange(start, end, device=self._device)
        for i, (layer, (slab, place)) in enumerate(zip(self._layers, self._places, strict=True)):
            keys, values = cache.recorded(i, start, end)
            slab.write(place, rows, unrotate(keys, positions, layer.rope, dtype=slab.row_dtype), values)

    def store_all(self, jobs: Sequence[tuple[Sequence[int], int, int]], cache: RecordingCache) -> None:
        """``store`` for several (pages, start, end)."""
        for pages, start, end in jobs:
            self.store(pages, start, end, cache)

    def install(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Store keys before RoPE, and values, of each layer in the first pages."""
        for (slab, place), (keys, values) in zip(self._places, layers, strict=True):
            slab.install(place, first_pages(len(keys)), keys, values)

    def inject(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], cache: RecordingCache) -> None:
        """Write records into an empty cache, one after the other from position 0.

        Args:
            pages: of each record.
            lengths: tokens to take of each.
            cache: empty; its batch size will be 1.
        """
        rows = torch.cat([self._rows(p, n) for p, n in zip(pages, lengths, strict=True)])
        positions = torch.arange(len(rows), device=self._device)
        for i, (layer, (slab, place)) in enumerate(zip(self._layers, self._places, strict=True)):
            keys, values = slab.rows(place, rows)
            cache.inject(i, rotate(keys, positions, layer.rope).to(slab.dtype), values.to(slab.dtype))

    def _rows(self, pages: Sequence[int], length: int) -> torch.Tensor:
        return torch.tensor(token_rows(pages, 0, length), dtype=torch.int64, device=self._device)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype, record_dtype: str) -> int:
    """Of a record: keys and values of all layers."""
    return sum(2 * layer.num_kv_heads * bytes_per_head(layer.head_size, dtype, record_dtype) for layer in layers)


def pages_for(tokens: int) -> int:
    """Pages that many tokens take."""
    return -(-tokens // PAGE_SIZE)
