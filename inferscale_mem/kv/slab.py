"""The preallocated memory of one worker in which records live.

Layer-major, because a backend takes one layer at a time, and page-granular, so that records of any length pack. Which
page belongs to whom is the directory's business (scheduler side); the slab only moves rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inferscale_mem.config import AUTO
from inferscale_mem.kernels.quantise import blank, dequantise, keep, parts
from inferscale_mem.kv.directory import PAGE_SIZE as PAGE_SIZE
from inferscale_mem.kv.host_memory import use_huge_pages

_BITS = {AUTO: None, "int8": 8}
_SCALE_BYTES = 2


def bytes_per_head(head_size: int, dtype: torch.dtype, record_dtype: str) -> int:
    """Of one token's keys, or values, of one head, as a slab stores them; ``dtype`` is that of the paged cache."""
    return head_size * dtype.itemsize if _BITS[record_dtype] is None else head_size + _SCALE_BYTES


def token_rows(pages: Sequence[int], offset: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Row numbers in the slab [count] of tokens ``offset`` to ``offset + count`` of the record in ``pages``."""
    page, within = np.divmod(np.arange(offset, offset + count, dtype=np.int64), PAGE_SIZE)
    rows: np.ndarray[Any, np.dtype[np.int64]] = np.asarray(pages, dtype=np.int64)[page] * PAGE_SIZE + within
    return rows


class Slab:
    """Keys before RoPE, and values, of layers that have the same number of heads and head size.

    Args:
        num_layers: how many layers.
        num_pages: pages of PAGE_SIZE tokens.
        num_kv_heads: of each layer on this rank.
        head_size: elements per head.
        dtype: of the paged cache.
        device: of the paged cache. On CPU the memory is claimed from the system page by page as it is first written.
        record_dtype: one of ``RECORD_DTYPES``.

    Attributes:
        keys, values: [num_layers, num_pages * PAGE_SIZE, num_kv_heads, head_size], as they are stored.
        row_dtype: in which rows are read: float32 where they are stored in fewer bits, so that each number is rounded
            once on its way into the paged cache; else ``dtype``.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        record_dtype: str = AUTO,
    ) -> None:
        shape = (num_layers, num_pages * PAGE_SIZE, num_kv_heads, head_size)
        self.shape, self.dtype, self.device = shape, dtype, device
        self.keys, self.values = (blank(shape, dtype, _BITS[record_dtype], device) for _ in range(2))
        self.row_dtype = dtype if isinstance(self.keys, torch.Tensor) else torch.float32
        for tensor in self._parts:
            use_huge_pages(tensor)

    @property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        return (*parts(self.keys), *parts(self.values))

    def read(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy rows of one layer into ``keys`` (before RoPE) and ``values``.

        Args:
            layer: index of the layer within this slab.
            rows: int64 row numbers, see ``token_rows``.
            keys: [len(rows), num_kv_heads, head_size], contiguous, ``row_dtype``; overwritten.
            values: likewise.
        """
        for stored, wanted in ((self.keys[layer], keys), (self.values[layer], values)):
            if isinstance(stored, torch.Tensor):
                # As rows of whole words: several times faster than element by element on a CPU.
                torch.index_select(_words(stored), 0, rows, out=_words(wanted))
            else:
                wanted.copy_(dequantise(stored, rows))

    def rows(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``read`` into new memory."""
        shape = (len(rows), *self.shape[2:])
        keys, values = (torch.empty(shape, dtype=self.row_dtype, device=self.device) for _ in range(2))
        self.read(layer, rows, keys, values)
        return keys, values

    def zero(self, rows: torch.Tensor) -> None:
        """Overwrite rows, int64, with zeros, in all layers."""
        for part in self._parts:
            part.index_fill_(1, rows, 0)

    def erase(self, pages: Sequence[int]) -> None:
        """Overwrite pages with zeros, in all layers."""
        self.zero(torch.from_numpy(token_rows(pages, 0, len(pages) * PAGE_SIZE)).to(self.device))

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows of one layer.

        Args:
            layer: index of the layer within this slab.
            rows: int64 row numbers.
            keys: before RoPE, [len(rows), num_kv_heads, head_size], ``row_dtype``.
            values: likewise, or of ``dtype``.
        """
        keep(self.keys[layer], rows, keys)
        keep(self.values[layer], rows, values)

    def install(self, layer: int, pages: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a record that came from elsewhere: ``write`` of any float dtype, from any device."""
        rows = torch.from_numpy(token_rows(pages, 0, len(keys))).to(self.device)
        self.write(layer, rows, *(part.to(self.device, self.row_dtype) for part in (keys, values)))


class Scratch:
    """Room for rows of one layer, kept between steps: fresh memory costs more than what is copied into it.

    Args:
        num_kv_heads, head_size, dtype, device: as in ``Slab``.
    """

    def __init__(self, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (num_kv_heads, head_size)
        self._both = torch.empty((2, 0, *self._shape), dtype=dtype, device=device)

    def take(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two contiguous tensors [count, num_kv_heads, head_size], valid until the next call; contents undefined."""
        if self._both.shape[1] < count:
            self._both = self._both.new_empty((2, count, *self._shape))
        return self._both[0, :count], self._both[1, :count]


def _words(rows: torch.Tensor) -> torch.Tensor:
    """[T, H, D] seen as rows of 8-byte words, where a row is a whole number of them."""
    flat = rows.flatten(1)
    return flat.view(torch.int64) if flat.shape[1] * flat.element_size() % 8 == 0 else flat
