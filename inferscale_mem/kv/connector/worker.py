"""Worker side of the connector: moves rows between the slab and the paged cache. Decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.metadata import Capture, Load, Rows, StepMetadata, WorkerReport
from inferscale_mem.kv.connector.writing import Writer, make_writers
from inferscale_mem.kv.rope import unrotate
from inferscale_mem.kv.rope_probe import deviation
from inferscale_mem.kv.slab import PAGE_SIZE, Slab, token_rows

NULL_BLOCK = 0
"""vLLM's block for tokens that a sliding window has passed; nothing may be written there."""


@dataclass(frozen=True)
class Family:
    """Layers of one shape, the slab they share, and what writes its rows to their caches."""

    layers: tuple[CachedLayer, ...]
    slab: Slab
    writers: tuple[Writer, ...]


class WorkerSide:
    """The duties of vLLM's worker-side hooks.

    Args:
        layers: from ``find_layers``.
        num_pages: of the slab; the scheduler side's directory counts the same.
    """

    def __init__(self, layers: Sequence[CachedLayer], num_pages: int) -> None:
        self._families = [_family(group, num_pages) for group in _by_shape(layers)]
        self._report = WorkerReport()

    def load(self, step: StepMetadata) -> None:
        """Write a step's injected tokens into the paged cache, all requests and segments at once."""
        if not step.loads:
            return
        rows, positions = _rows_and_positions([rows for load in step.loads for rows in load.rows])
        groups = {(writer.group, writer.block_size) for family in self._families for writer in family.writers}
        targets = {group: _targets(step.loads, rows, positions, group, size) for group, size in groups}
        for family in self._families:
            device = family.slab.keys.device
            for writer in family.writers:
                writer.write(*(tensor.to(device) for tensor in targets[writer.group]))

    def erase(self, step: StepMetadata) -> None:
        """Overwrite the pages of records that were dropped, before anything of this step is kept in them."""
        if step.erase:
            for family in self._families:
                family.slab.erase(step.erase)

    def capture(self, step: StepMetadata) -> None:
        """Keep what a step computed of spans being encoded, and report those now complete."""
        for capture in step.captures:
            for family in self._families:
                self._capture(family, capture)
            if capture.final:
                self._report.done[capture.generation] += 1

    def take_report(self) -> WorkerReport | None:
        """What was finished since the last call."""
        report, self._report = self._report, WorkerReport(Counter())
        return report if report.done else None

    def _capture(self, family: Family, capture: Capture) -> None:
        device = family.slab.keys.device
        rows, positions = (t.to(device) for t in _rows_and_positions([capture.rows]))
        for index, layer in enumerate(family.layers):
            reach = (capture.rows.position, capture.rows.position + capture.rows.count)
            slots = _slots(*reach, capture.block_table[layer.group], layer.block_size).to(device)
            keys, values = layer.read(slots)
            if layer.rope is not None:
                keys = unrotate(keys, positions, layer.rope)
            family.slab.write(index, rows, keys, values)
            if capture.probe and capture.final:
                length = capture.rows.offset + capture.rows.count
                whole = torch.from_numpy(token_rows(capture.rows.pages, 0, length)).to(device)
                self._report.deviations[layer.name] = deviation(family.slab.keys[index, whole], layer.rope)


def _by_shape(layers: Sequence[CachedLayer]) -> list[list[CachedLayer]]:
    shapes: defaultdict[tuple[int, int], list[CachedLayer]] = defaultdict(list)
    for layer in layers:
        shapes[layer.num_kv_heads, layer.head_size].append(layer)
    return list(shapes.values())


def _family(layers: list[CachedLayer], num_pages: int) -> Family:
    first = layers[0]
    cache = first.module.kv_cache
    shape = (first.num_kv_heads, first.head_size)
    slab = Slab(len(layers), num_pages, *shape, cache.dtype, cache.device)
    return Family(tuple(layers), slab, tuple(make_writers(layers, slab)))


def _rows_and_positions(parts: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor]:
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
    return torch.from_numpy(rows), torch.from_numpy(index + spread([part.position for part in parts]))


def _slots(start: int, end: int, blocks: Sequence[int], block_size: int) -> torch.Tensor:
    """Slots of a request's positions ``start`` to ``end``."""
    block, offset = np.divmod(np.arange(start, end, dtype=np.int64), block_size)
    return torch.from_numpy(np.asarray(blocks, dtype=np.int64)[block] * block_size + offset)


def _targets(
    loads: Sequence[Load], rows: torch.Tensor, positions: torch.Tensor, group: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, positions and slots of what one KV cache group has to get."""
    slots = torch.cat([_slots(*_reach(load), load.block_table[group], block_size) for load in loads])
    wanted = slots // block_size != NULL_BLOCK
    if bool(wanted.all()):
        return rows, positions, slots
    return rows[wanted], positions[wanted], slots[wanted]


def _reach(load: Load) -> tuple[int, int]:
    """Positions of a load: its rows follow each other without a gap."""
    return load.rows[0].position, load.rows[-1].position + load.rows[-1].count
