"""The tokens of a step, spelled out: rows of the slab, positions in the prompt, slots of the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inferscale_mem.kernels.paged import Step
from inferscale_mem.kv.connector.metadata import BlockTable, Load, Rows
from inferscale_mem.kv.slab import PAGE_SIZE

NULL_BLOCK = 0
"""vLLM's block for tokens that a sliding window has passed; nothing may be written there."""

_Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class StepTokens:
    """Tokens of some segments, one after the other, in the forms that writers and readers take; each made once.

    Args:
        parts: per request its segments, which follow each other without a gap, and its block table.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Rows], BlockTable]]) -> None:
        self._parts = parts
        self._rows, self._positions = _rows_and_positions([rows for segments, _ in parts for rows in segments])
        self._slots: dict[tuple[int, int, torch.device], _Slots] = {}
        self._steps: dict[tuple[int, torch.device], Step] = {}

    @classmethod
    def of_loads(cls, loads: Sequence[Load]) -> StepTokens:
        """All that a step injects."""
        return cls([(load.rows, load.block_table) for load in loads])

    def slots(self, group: int, block_size: int, device: torch.device) -> _Slots:
        """Rows, positions and slots, each [tokens] int64, of what one KV cache group keeps."""
        key = group, block_size, device
        if key not in self._slots:
            slots = np.concatenate([_slots(*_reach(rows), table[group], block_size) for rows, table in self._parts])
            found = (self._rows, self._positions, slots)
            wanted = slots // block_size != NULL_BLOCK
            if not wanted.all():
                found = (self._rows[wanted], self._positions[wanted], slots[wanted])
            rows, positions, targets = (torch.from_numpy(numbers).to(device) for numbers in found)
            self._slots[key] = rows, positions, targets
        return self._slots[key]

    def step(self, group: int, device: torch.device) -> Step:
        """The same for kernels that look slots up themselves."""
        key = group, device
        if key not in self._steps:
            tables = [np.asarray(table[group], dtype=np.int64) for _, table in self._parts]
            starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
            counts = [sum(part.count for part in rows) for rows, _ in self._parts]
            at = np.repeat(starts, counts)
            self._steps[key] = Step(self._rows, self._positions, at, np.concatenate(tables), device)
        return self._steps[key]


def _rows_and_positions(parts: Sequence[Rows]) -> tuple[Any, Any]:
    """Slab rows and prompt positions of some parts, one after the other, each [tokens] int64."""
    counts = [part.count for part in parts]
    starts = np.cumsum([0, *counts[:-1]])  # of each part among all tokens
    first_pages = np.cumsum([0, *(len(part.pages) for part in parts[:-1])])  # of each part among all pages

    def spread(values: Any) -> Any:
        return np.repeat(np.asarray(values, dtype=np.int64), counts)

    index = np.arange(sum(counts), dtype=np.int64) - spread(starts)
    page, within = np.divmod(index + spread([part.offset for part in parts]), PAGE_SIZE)
    pages = np.asarray([page for part in parts for page in part.pages], dtype=np.int64)
    rows = pages[page + spread(first_pages)] * PAGE_SIZE + within
    return rows, index + spread([part.position for part in parts])


def _slots(start: int, end: int, blocks: Sequence[int], block_size: int) -> Any:
    """Slots of a request's positions ``start`` to ``end``."""
    block, offset = np.divmod(np.arange(start, end, dtype=np.int64), block_size)
    return np.asarray(blocks, dtype=np.int64)[block] * block_size + offset


def _reach(rows: Sequence[Rows]) -> tuple[int, int]:
    """Positions of segments that follow each other without a gap."""
    return rows[0].position, rows[-1].position + rows[-1].count
