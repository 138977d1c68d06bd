"""How an attention backend lays a block of its paged cache out in memory.

GPU backends show [heads, tokens, 2 * head_size] per block, keys first. The CPU backend permutes the elements of a block
for its instruction set, differently on each machine. Rather than know every packing, we let the backend write numbered
values into scratch blocks and look where they land.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inferscale_mem.errors import EngineError

WriteBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(keys [T, H, D], values [T, H, D], cache, slots [T]) -> None: the backend's own write."""

_BASE = 128  # digits below 129 are exact in every float type a cache can have, bfloat16 included


@dataclass(frozen=True)
class Packing:
    """Where each element of a token's keys and values lies inside a block.

    Attributes:
        keys: int64 [block_size, num_kv_heads, head_size]: flat offset in the block's logical view.
        values: likewise.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some tokens, each [len(slots), num_kv_heads, head_size], as the backend holds them.

        Args:
            cache: one layer's paged cache, [num_blocks, num_kv_heads, block_size, 2 * head_size].
            slots: int64, block number * block size + offset in the block.
        """
        block_size = self.keys.shape[0]
        blocks, offsets = slots // block_size, slots % block_size
        used, inverse = torch.unique(blocks, return_inverse=True)
        flat = cache.index_select(0, used).reshape(len(used), -1)
        rows = inverse[:, None, None]
        return flat[rows, self.keys[offsets]], flat[rows, self.values[offsets]]

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values as views [num_blocks, block_size, num_kv_heads, head_size], where a block is packed as its
        shape says, as GPU backends do; None where it is not.

        Args:
            cache: as in ``read``; any strides.
        """
        block_size, heads, head_size = self.keys.shape
        places = torch.arange(2 * self.keys.numel(), device=self.keys.device).view(heads, block_size, 2, head_size)
        keys, values = places.transpose(0, 1).unbind(2)
        if not (torch.equal(self.keys, keys) and torch.equal(self.values, values)):
            return None
        first, second = cache.transpose(1, 2).chunk(2, dim=-1)
        return first, second


def learn_packing(write: WriteBlocks, scratch: torch.Tensor, head_size: int) -> Packing:
    """Find out how a backend packs its blocks.

    Args:
        write: the backend's write.
        scratch: two blocks like the cache's: [2, num_kv_heads, block_size, 2 * head_size]; overwritten.
        head_size: elements per head.

    Raises:
        EngineError: the backend does not store each element exactly once, unchanged (a quantised cache, for one).
    """
    _, heads, block_size, width = scratch.shape
    shape = (block_size, heads, head_size)
    count = block_size * heads * head_size
    if width != 2 * head_size:
        raise EngineError(f"cache blocks of {tuple(scratch.shape)} do not hold keys and values of {head_size} elements")
    numbers = torch.arange(1, 2 * count + 1, device=scratch.device)
    slots = torch.arange(block_size, device=scratch.device)
    landed = torch.zeros(2 * count, dtype=torch.int64, device=scratch.device)
    weight = 1
    while weight <= 2 * count:
        digits = (numbers // weight % _BASE).to(scratch.dtype)
        write(digits[:count].view(shape), digits[count:].view(shape), scratch, slots)
        landed += scratch[0].reshape(-1).to(torch.int64) * weight
        weight *= _BASE
    order = torch.argsort(landed)
    if not torch.equal(landed[order], numbers):
        raise EngineError("the attention backend does not keep keys and values as they are written")
    packing = Packing(order[:count].view(shape), order[count:].view(shape))
    _check(write, scratch, packing, shape)
    return packing


def _check(write: WriteBlocks, scratch: torch.Tensor, packing: Packing, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator).to(scratch) for _ in range(2))
    slots = torch.arange(shape[0], 2 * shape[0], device=scratch.device)
    write(keys, values, scratch, slots)
    got_keys, got_values = packing.read(scratch, slots)
    if not (torch.equal(got_keys, keys) and torch.equal(got_values, values)):
        raise EngineError("the attention backend packs its second block differently from its first")
