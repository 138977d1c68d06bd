"""What kernels are measured on: facts scattered over a slab, to be written to blocks scattered over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from inferscale_mem.cli.bench.prompts import FACT_TOKENS, HEADER_TOKENS
from inferscale_mem.kernels.quantise import Stored, parts
from inferscale_mem.kv.host_memory import use_huge_pages

WORST_ULPS = 1
"""Units in the last place by which a kernel may differ from its reference."""


@dataclass(frozen=True)
class Case:
    """One kernel, checked, and ready to be timed.

    Attributes:
        name: what it does, and with what.
        threads: it runs on; None on a GPU.
        tokens: it moves; of a search, rows that are compared.
        ulps: how far it is from its reference, in units of the last place; infinite where only one is a number.
        moved: bytes read and written. Its copy reads half of them, and writes as many.
        call: runs it.
    """

    name: str
    threads: int | None
    tokens: int
    ulps: float
    moved: int
    call: Callable[[], object]


class Problem:
    """Facts of 22 tokens behind a header, scattered over a slab, to be written to positions of one request.

    Args:
        layers, heads, size: of the model; ``heads`` are KV heads, ``size`` their channels.
        count: tokens.
        block_size: tokens per block of the paged cache.
        device: of both.
    """

    def __init__(self, layers: int, heads: int, size: int, count: int, block_size: int, device: torch.device) -> None:
        self.layers, self.heads, self.size, self.count = layers, heads, size, count
        self.block_size, self.device = block_size, device
        generator = np.random.default_rng(0)
        facts = -(-count // FACT_TOKENS)
        room = -(-FACT_TOKENS // 8) * 8  # as the slab's pages have it
        self.num_rows = room * 4 * facts
        firsts = generator.permutation(4 * facts)[:facts] * room
        self.rows = (firsts[:, None] + np.arange(FACT_TOKENS)).reshape(-1)[:count]
        self.positions = np.arange(count) + HEADER_TOKENS
        length = -(-(count + HEADER_TOKENS) // block_size)
        self.num_blocks = 4 * length
        self.block_table = generator.permutation(self.num_blocks)[:length]
        numbers = self.rows, self.block_table[self.positions // block_size], self.positions % block_size
        rows, blocks, offsets = (torch.from_numpy(part.astype(np.int64)).to(device) for part in numbers)
        self.places = rows, blocks, offsets
        self._generator = torch.Generator(device=device).manual_seed(0)
        angles = torch.rand(count + HEADER_TOKENS, size // 2, device=device, generator=self._generator) * 6.28
        self.table = torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16()
        self.at = self.table[torch.from_numpy(self.positions).to(device)].float()

    def random(self, dtype: torch.dtype) -> torch.Tensor:
        """Keys or values of a whole slab, [layers, rows, heads, size]."""
        shape = (self.layers, self.num_rows, self.heads, self.size)
        made = self._room(shape, dtype)
        return made.copy_(torch.randn(shape, device=self.device, generator=self._generator))

    def memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Paged caches of all layers, poisoned: [layers, blocks, elements]."""
        shape = (self.layers, self.num_blocks, 2 * self.block_size * self.heads * self.size)
        return self._room(shape, dtype).fill_(float("nan"))

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        use_huge_pages(made)
        return made

    def moved(self, cached: torch.dtype, *stored: Stored) -> int:
        """Bytes of keys and values of all layers, in the paged cache and as they are stored."""
        in_cache = 2 * self.layers * self.count * self.heads * self.size * cached.itemsize
        tensors = [tensor for one in stored for tensor in parts(one)]
        return in_cache + sum(
            tensor.numel() * tensor.element_size() * self.count // self.num_rows for tensor in tensors
        )


def ulps(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest distance, in units of the last place; infinite where only one is a number."""
    if not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    least = torch.iinfo(bits).min
    steps = [x.nan_to_num(0.0).view(bits).long() for x in (got, wanted)]
    first, second = (torch.where(x < 0, least - x, x) for x in steps)
    return float((first - second).abs().max())
