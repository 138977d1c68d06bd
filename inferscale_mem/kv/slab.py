"""The preallocated memory of one worker in which records live.

Layer-major, because a backend takes one layer at a time, and page-granular, so that records of any length pack. Which
page belongs to whom is the directory's business (scheduler side); the slab only moves rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAGE_SIZE = 8
"""Tokens per page: a fact of some 22 tokens wastes 2 on average at 4, 4 at 8, 8 at 16; 8 keeps page lists short."""


def token_rows(pages: Sequence[int], offset: int, count: int) -> list[int]:
    """Row numbers in the slab of tokens ``offset`` to ``offset + count`` of the record that lies in ``pages``."""
    return [pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(offset, offset + count)]


class Slab:
    """Keys before RoPE, and values, of layers that have the same number of heads and head size.

    Args:
        num_layers: how many layers.
        num_pages: pages of PAGE_SIZE tokens.
        num_kv_heads: of each layer on this rank.
        head_size: elements per head.
        dtype: as in the paged cache.
        device: of the paged cache. On CPU the memory is claimed from the system page by page as it is first written.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages * PAGE_SIZE, num_kv_heads, head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (before RoPE) and values, each [num_layers, len(rows), num_kv_heads, head_size], copied.

        Args:
            rows: int64 row numbers, see ``token_rows``.
        """
        return self.keys.index_select(1, rows), self.values.index_select(1, rows)

    def erase(self, pages: Sequence[int]) -> None:
        """Overwrite pages with zeros, in all layers."""
        rows = torch.tensor(token_rows(pages, 0, len(pages) * PAGE_SIZE), device=self.keys.device)
        self.keys.index_fill_(1, rows, 0)
        self.values.index_fill_(1, rows, 0)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows of one layer.

        Args:
            layer: index of the layer within this slab.
            rows: int64 row numbers.
            keys: before RoPE, [len(rows), num_kv_heads, head_size], the slab's dtype.
            values: likewise.
        """
        self.keys[layer].index_copy_(0, rows, keys)
        self.values[layer].index_copy_(0, rows, values)
