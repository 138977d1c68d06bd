"""Problems for kernels that move records to and from a paged cache, and how far apart two answers are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inferscale_mem.kernels.paged import Step
from inferscale_mem.kernels.quantise import Stored, quantise

Form = tuple[int, int, int]
"""Bits, and how many rows and channels share a scale."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS, NULL_BLOCK = 90, 0


@dataclass(frozen=True)
class Case:
    """One problem; ``requests``: per request its segments (position, tokens), ``formats`` of keys and of values."""

    requests: tuple[tuple[tuple[int, int], ...], ...] = (((0, 5), (5, 9)), ((3, 1),))
    heads: int = 2
    size: int = 16
    rotary: int = 16
    neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype = torch.bfloat16
    order: str = "NHD"
    block_size: int = 4
    formats: tuple[Form | None, Form | None] = (None, None)
    table: torch.dtype = torch.float32


def caches_of(case: Case, layers: int, blocks: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Poisoned memory [layers, blocks, elements], and its views [blocks, block_size, H, D] of keys and of values."""
    n, h, d = case.block_size, case.heads, case.size
    memory = torch.full((layers, blocks, 2 * n * h * d), float("nan"), dtype=case.dtype, device=DEVICE)
    if case.order == "NHD":  # vLLM 0.32: keys beside values
        views = memory.view(layers, blocks, n, h, 2, d).unbind(4)
    elif case.order == "HND":
        views = memory.view(layers, blocks, h, n, 2, d).transpose(2, 3).unbind(4)
    else:
        assert case.order == "apart"
        views = memory.view(layers, blocks, 2, n, h, d).unbind(2)
    return memory, *([*view] for view in views)


def places_of(view: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """[block_size, H, D]: the place of each element in a block."""
    first = view.storage_offset() - memory.storage_offset()
    numbers = torch.arange(memory[0].numel(), device=DEVICE)
    return torch.as_strided(numbers, view.shape[1:], view.stride()[1:], first % memory.stride(0))


def store(floats: torch.Tensor, form: Form | None) -> Stored:
    return floats if form is None else quantise(floats, form[0], rows=form[1], channels=form[2])


def distance(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many representable numbers apart, at most; both must be poisoned in the same places."""
    assert torch.equal(got.isnan(), wanted.isnan())
    if got.dtype == torch.float32:
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
        return 0
    steps = [x.nan_to_num(0.0).view(torch.int16).int() for x in (got, wanted)]
    ordered = [torch.where(x < 0, -32768 - x, x) for x in steps]
    return int((ordered[0] - ordered[1]).abs().max())


class Where:
    """Which rows a case's tokens have, and their blocks: ``step`` for a kernel; ``places`` (rows, blocks, offsets) and
    ``positions`` for a reference, without the tokens of the null block."""

    def __init__(self, case: Case, num_rows: int, generator: torch.Generator) -> None:
        position_lists = [
            np.concatenate([np.arange(s, s + n) for s, n in parts] or [np.zeros(0, int)]) for parts in case.requests
        ]
        width = -(-POSITIONS // case.block_size)
        order = torch.randperm(1 + width * len(case.requests), generator=generator).numpy()
        tables = order[: width * len(case.requests)].reshape(len(case.requests), width)
        self.num_blocks = len(order)
        positions = np.concatenate(position_lists)
        request = np.repeat(np.arange(len(case.requests)), [len(p) for p in position_lists])
        rows = torch.randperm(num_rows, generator=generator).numpy()[: len(positions)]
        self.step = Step(rows, positions, request * width, tables.reshape(-1), DEVICE)
        blocks = tables[request, positions // case.block_size]
        self.kept = torch.from_numpy(blocks != NULL_BLOCK).to(DEVICE)
        numbers = (rows, blocks, positions % case.block_size, positions)
        *self.places, self.positions = (torch.from_numpy(n.astype(np.int64)).to(DEVICE)[self.kept] for n in numbers)
        self.all_positions = torch.from_numpy(positions.astype(np.int64)).to(DEVICE)
