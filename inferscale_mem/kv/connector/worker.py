"""Worker side of the connector: moves rows between the slab and the paged cache. Decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm import _custom_ops as ops

from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.metadata import Capture, Load, Rows, StepMetadata, WorkerReport
from inferscale_mem.kv.rope import RopeTable, rotate, unrotate
from inferscale_mem.kv.rope_probe import deviation
from inferscale_mem.kv.slab import Slab, token_rows

NULL_BLOCK = 0
"""vLLM's block for tokens that a sliding window has passed; nothing may be written there."""


@dataclass(frozen=True)
class Family:
    """Layers of one shape, the slab they share, and which of them rotate alike."""

    layers: tuple[CachedLayer, ...]
    slab: Slab
    ropes: tuple[tuple[RopeTable | None, slice | list[int]], ...]


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
        for family in self._families:
            device = family.slab.keys.device
            keys, values = family.slab.read(rows.to(device))
            where = positions.to(device)
            for rope, members in family.ropes:
                _rotate_in_place(keys, members, where, rope)
            slots = _slots_by_group(family.layers, step.loads, device)
            for index, layer in enumerate(family.layers):
                at, kept = slots[layer.group]
                k, v = keys[index], values[index]
                layer.write(k, v, at) if kept is None else layer.write(k[kept], v[kept], at)

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
            slots = _slots(capture.rows, capture.block_table[layer.group], layer.block_size).to(device)
            keys, values = layer.read(slots)
            if layer.rope is not None:
                keys = unrotate(keys, positions, layer.rope)
            family.slab.write(index, rows, keys, values)
            if capture.probe and capture.final:
                length = capture.rows.offset + capture.rows.count
                whole = torch.tensor(token_rows(capture.rows.pages, 0, length), device=device)
                self._report.deviations[layer.name] = deviation(family.slab.keys[index, whole], layer.rope)


def _rotate_in_place(
    keys: torch.Tensor, members: slice | list[int], positions: torch.Tensor, rope: RopeTable | None
) -> None:
    if rope is None:
        return
    kernel = ops.rotary_embedding if keys.dtype == rope.dtype and rope.kernel_safe else None
    if isinstance(members, slice):
        rotate(keys, positions, rope, out=keys, kernel=kernel)
    else:
        keys[members] = rotate(keys[members], positions, rope, kernel=kernel)


def _by_shape(layers: Sequence[CachedLayer]) -> list[list[CachedLayer]]:
    shapes: defaultdict[tuple[int, int], list[CachedLayer]] = defaultdict(list)
    for layer in layers:
        shapes[layer.num_kv_heads, layer.head_size].append(layer)
    return list(shapes.values())


def _family(layers: list[CachedLayer], num_pages: int) -> Family:
    first = layers[0]
    cache = first.module.kv_cache
    slab = Slab(len(layers), num_pages, first.num_kv_heads, first.head_size, cache.dtype, cache.device)
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        alike[id(layer.rope)].append(index)
    ropes = tuple(
        (layers[members[0]].rope, slice(None) if len(members) == len(layers) else members) for members in alike.values()
    )
    return Family(tuple(layers), slab, ropes)


def _rows_and_positions(parts: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [row for part in parts for row in token_rows(part.pages, part.offset, part.count)]
    positions = [position for part in parts for position in range(part.position, part.position + part.count)]
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


def _slots(part: Rows, blocks: Sequence[int], block_size: int) -> torch.Tensor:
    positions = range(part.position, part.position + part.count)
    return torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in positions], dtype=torch.int64)


def _slots_by_group(
    layers: Sequence[CachedLayer], loads: Sequence[Load], device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """Per KV cache group: slots to write, and which tokens to leave out (None: none)."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for group, block_size in {layer.group: layer.block_size for layer in layers}.items():
        slots = torch.cat([_slots(rows, load.block_table[group], block_size) for load in loads for rows in load.rows])
        kept = slots // block_size != NULL_BLOCK
        if bool(kept.all()):
            found[group] = (slots.to(device), None)
        else:
            found[group] = (slots[kept].to(device), kept.to(device))
    return found
