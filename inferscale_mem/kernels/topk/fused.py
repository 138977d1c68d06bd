"""Top-k by Triton: only rows of the wanted scope are read; of each block of rows only its best k are written.

Score and row travel in one 64-bit key that sorts as they should: by score, and of equal ones the first row. Blocks'
winners are played off against each other, a thousand at a time, until one block is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferscale_mem.kernels.rope.fused import for_this_machine

_BLOCK = 128
"""Rows scored together."""
_ROUND = 1024
"""Winners that are played off together."""
MOST = 512
"""The largest k."""

_NOTHING = tl.constexpr(-(1 << 63))
_CONFIGS = [
    triton.Config({"COLUMNS": columns}, num_warps=warps) for columns, warps in ((64, 4), (32, 4), (64, 8), (128, 8))
]


def topk(
    embeddings: torch.Tensor, scopes: torch.Tensor, queries: torch.Tensor, wanted: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.topk``; all contiguous and on one device. Products are summed in float32, in another order.

    Raises:
        ValueError: k is not from 1 to MOST.
    """
    if not 1 <= k <= MOST:
        raise ValueError(f"k must be from 1 to {MOST}, not {k}")
    assert all(tensor.is_contiguous() for tensor in (embeddings, scopes, queries, wanted))
    (count, size), asked = embeddings.shape, len(queries)
    kept = max(2, triton.next_power_of_2(k))  # one would no longer be a vector
    block = max(_BLOCK, kept)
    blocks = triton.cdiv(count, block)
    if not blocks or not asked:
        nothing = embeddings.new_full((asked, k), -torch.inf, dtype=torch.float32)
        return nothing, wanted.new_full((asked, k), -1, dtype=torch.int64)
    keys = torch.empty(asked, blocks * kept, dtype=torch.int64, device=embeddings.device)
    _score[(blocks, asked)](embeddings, scopes, queries, wanted, keys, count, SIZE=size, BLOCK=block, KEPT=kept)
    while blocks > 1:
        before, blocks = keys, triton.cdiv(keys.shape[1], _ROUND)
        keys = torch.empty(asked, blocks * kept, dtype=torch.int64, device=embeddings.device)
        _play_off[(blocks, asked)](before, keys, before.shape[1], ROUND=_ROUND, KEPT=kept)
    return _unpacked(keys[:, :k])


def _unpacked(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = (keys >> 32).to(torch.int32)
    scores = torch.where(order >= 0, order, order ^ 0x7FFFFFFF).view(torch.float32)
    found = keys != _NOTHING.value
    return torch.where(found, scores, -torch.inf), torch.where(found, 0xFFFFFFFF - (keys & 0xFFFFFFFF), -1)


@triton.autotune(configs=for_this_machine(_CONFIGS), key=["SIZE", "KEPT"])
@triton.jit(do_not_specialize=["count"])
def _score(  # type: ignore[no-untyped-def]
    embeddings, scopes, queries, wanted, keys, count,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scope = tl.load(scopes + row, mask=row < count, other=-1)
    ours = tl.load(wanted + query)
    found = (scope >= 0) & ((scope == ours) | (ours == -1))
    at = row.to(tl.int64)[:, None] * SIZE
    products = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for first in range(0, SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < SIZE
        asked = tl.load(queries + query.to(tl.int64) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        mask = found[:, None] & inside[None, :]
        products += tl.load(embeddings + at + column[None, :], mask=mask, other=0.0).to(tl.float32) * asked[None, :]
    bits = tl.sum(products, 1).to(tl.int32, bitcast=True)  # no -0.0: sums begin with 0.0
    order = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)
    key = tl.where(found, (order << 32) | (0xFFFFFFFF - row.to(tl.int64)), _NOTHING)
    place = (query.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * KEPT + tl.arange(0, KEPT)
    tl.store(keys + place, tl.topk(key, KEPT))


@triton.jit(do_not_specialize=["count"])
def _play_off(keys, winners, count, ROUND: tl.constexpr, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The KEPT largest of each ROUND of a query's ``count`` keys."""
    query = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * ROUND + tl.arange(0, ROUND)
    key = tl.load(keys + query * count + number, mask=number < count, other=_NOTHING)
    place = (query * tl.num_programs(0) + tl.program_id(0)) * KEPT + tl.arange(0, KEPT)
    tl.store(winners + place, tl.topk(key, KEPT))
