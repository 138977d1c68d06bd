from __future__ import annotations

import pytest
import torch

from inferscale_mem.errors import EngineError
from inferscale_mem.kv.packing import learn_packing

HEADS, BLOCK, SIZE = 3, 16, 8


def permuting_write(order: torch.Tensor, dtype: torch.dtype = torch.bfloat16):  # type: ignore[no-untyped-def]
    """A backend that packs the elements of a block in an order of its own."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            block = cache[slot // BLOCK].reshape(-1)
            number = torch.arange(HEADS * SIZE) + slot % BLOCK * HEADS * SIZE
            block[order[number]] = keys[token].reshape(-1).to(dtype).to(cache.dtype)
            block[order[number + BLOCK * HEADS * SIZE]] = values[token].reshape(-1).to(cache.dtype)
            cache[slot // BLOCK] = block.view(cache.shape[1:])

    return write


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_order_is_learned(dtype: torch.dtype) -> None:
    order = torch.randperm(2 * BLOCK * HEADS * SIZE, generator=torch.Generator().manual_seed(0))
    write = permuting_write(order, dtype)
    packing = learn_packing(write, torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=dtype), SIZE)
    cache = torch.full((5, HEADS, BLOCK, 2 * SIZE), float("nan"), dtype=dtype)
    slots = torch.tensor([4 * BLOCK + 3, 7, BLOCK, 8])
    keys, values = (torch.randn(len(slots), HEADS, SIZE).to(dtype) for _ in range(2))
    write(keys, values, cache, slots)
    got_keys, got_values = packing.read(cache, slots)
    assert torch.equal(got_keys, keys) and torch.equal(got_values, values)


def test_a_cache_that_changes_what_is_written_is_refused() -> None:
    order = torch.arange(2 * BLOCK * HEADS * SIZE)

    def rounding(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        permuting_write(order)((keys / 16).round() * 16, values, cache, slots)

    with pytest.raises(EngineError, match="does not keep keys and values"):
        learn_packing(rounding, torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16), SIZE)


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(EngineError, match="do not hold keys and values"):
        learn_packing(permuting_write(torch.arange(1)), torch.zeros(2, HEADS, BLOCK, SIZE), SIZE)
