"""What the scheduler side tells the workers each step, and what they tell it back. No tensors, no token ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

BlockTable = tuple[list[int], ...]
"""Block ids of one request, per KV cache group."""


@dataclass(frozen=True)
class Rows:
    """Consecutive tokens of one record, and where they stand in a prompt.

    Attributes:
        pages: slab pages of the record.
        offset: first token, counted within the record.
        count: how many.
        position: of the first one in the prompt.
    """

    pages: tuple[int, ...]
    offset: int
    count: int
    position: int


@dataclass(frozen=True)
class Load:
    """Inject: rotate these rows to their positions and write them into the request's blocks."""

    rows: tuple[Rows, ...]
    block_table: BlockTable


@dataclass(frozen=True)
class Capture:
    """Encode: read this step's tokens of a span out of the request's blocks, undo the rotation, keep them.

    Attributes:
        generation: of the record.
        rows: where to keep them and where they stand.
        block_table: the request's blocks.
        final: the span is complete with these.
        probe: also check that the whole record's keys do not depend on position.
    """

    generation: int
    rows: Rows
    block_table: BlockTable
    final: bool
    probe: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):
    """All of a step; workers do it in the order of these fields.

    Attributes:
        loads: before the forward pass.
        erase: slab pages whose content must be gone: their records were dropped, not just evicted.
        captures: after the forward pass.
    """

    loads: list[Load] = field(default_factory=list)
    erase: list[int] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers finished in a step.

    Attributes:
        done: generation -> how many workers have the whole record.
        deviations: layer name -> how far its keys before RoPE depend on position (probes only), 0 is perfect.
    """

    done: Counter[int] = field(default_factory=Counter)
    deviations: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both reports in one."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.done + other.done, {**self.deviations, **other.deviations})
