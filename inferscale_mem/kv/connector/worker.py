"""Worker side of the connector: moves rows between the slab and the paged cache. Decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferscale_mem.config import AUTO
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.metadata import Capture, StepMetadata, WorkerReport
from inferscale_mem.kv.connector.reading import Reader, make_readers
from inferscale_mem.kv.connector.tokens import StepTokens
from inferscale_mem.kv.connector.writing import Writer, make_writers
from inferscale_mem.kv.directory import first_pages
from inferscale_mem.kv.preamble import Preamble
from inferscale_mem.kv.rope import unrotate
from inferscale_mem.kv.rope_probe import deviation
from inferscale_mem.kv.slab import Slab


@dataclass(frozen=True)
class Family:
    """Layers of one shape, the slab they share, and what moves its rows to and from their caches."""

    layers: tuple[CachedLayer, ...]
    slab: Slab
    writers: tuple[Writer, ...]
    readers: tuple[Reader, ...]


class WorkerSide:
    """The duties of vLLM's worker-side hooks.

    Args:
        layers: from ``find_layers``.
        num_pages: of the slab; the scheduler side's directory counts the same.
        record_dtype: in which the slab stores records.
        preamble: is stored in the first pages.

    Raises:
        ConfigError: the preamble was trained for another model.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        num_pages: int,
        record_dtype: str = AUTO,
        preamble: Preamble | None = None,
    ) -> None:
        self._families = [_family(group, num_pages, record_dtype) for group in _by_shape(layers)]
        if preamble is not None:
            self._install(preamble, layers)
        self._report = WorkerReport()
        self._probed: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def load(self, step: StepMetadata) -> None:
        """Write a step's injected tokens into the paged cache, all requests and segments at once."""
        if not step.loads:
            return
        tokens = StepTokens.of_loads(step.loads)
        for family in self._families:
            for writer in family.writers:
                writer.write(tokens)

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

    def _install(self, preamble: Preamble, layers: Sequence[CachedLayer]) -> None:
        loaded = preamble.load([(layer.num_kv_heads, layer.head_size) for layer in layers])
        of = {layer.name: parts for layer, parts in zip(layers, loaded, strict=True)}
        pages = first_pages(len(preamble.segment.token_ids))
        for family in self._families:
            for place, layer in enumerate(family.layers):
                family.slab.install(place, pages, *of[layer.name])

    def _capture(self, family: Family, capture: Capture) -> None:
        tokens = StepTokens([((capture.rows,), capture.block_table)])
        for reader in family.readers:
            reader.read(tokens)
        for layer in family.layers if capture.probe else ():
            self._probe(layer, tokens, capture.final)

    def _probe(self, layer: CachedLayer, tokens: StepTokens, final: bool) -> None:
        """Keys are taken from the paged cache as they are: rounding them to few bits would hide what is looked for."""
        _, positions, slots = tokens.slots(layer.group, layer.block_size, layer.module.kv_cache.device)
        keys, _ = layer.read(slots)
        self._probed[layer.name].append(unrotate(keys, positions, layer.rope))
        if final:
            self._report.deviations[layer.name] = deviation(
                torch.cat(self._probed.pop(layer.name)), layer.rope, keys.dtype
            )


def _by_shape(layers: Sequence[CachedLayer]) -> list[list[CachedLayer]]:
    shapes: defaultdict[tuple[int, int], list[CachedLayer]] = defaultdict(list)
    for layer in layers:
        shapes[layer.num_kv_heads, layer.head_size].append(layer)
    return list(shapes.values())


def _family(layers: list[CachedLayer], num_pages: int, record_dtype: str) -> Family:
    first = layers[0]
    cache = first.module.kv_cache
    shape = (first.num_kv_heads, first.head_size)
    slab = Slab(len(layers), num_pages, *shape, cache.dtype, cache.device, record_dtype)
    return Family(tuple(layers), slab, tuple(make_writers(layers, slab)), tuple(make_readers(layers, slab)))
