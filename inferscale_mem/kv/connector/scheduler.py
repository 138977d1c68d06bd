"""Scheduler side of the connector: reads requests' orders, decides what is injected, keeps the directory."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferscale_mem import wire
from inferscale_mem.config import AUTO
from inferscale_mem.errors import BudgetError, InputError
from inferscale_mem.handles import may_name
from inferscale_mem.kv.connector.metadata import Capture, Load, Rows, StepMetadata, WorkerReport
from inferscale_mem.kv.directory import DROPPED, FORGED, LAST, Directory, Match, Record, Wanted
from inferscale_mem.types import Miss, Segment, Span

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

KEPT = 256
"""Answers kept, the latest, for whoever did not hear them; see ``_keep``."""


@dataclass
class Making:
    """A span being encoded."""

    record: Record
    span: Span
    covered: int = 0
    """Tokens of the span whose capture has been scheduled."""


@dataclass
class Job:
    """One request that carries an order.

    Attributes:
        order: what it asks.
        match: what can be injected; pinned until the request is finished.
        end: injected positions are those below.
        local: tokens the engine found in its own prefix cache at the last look-up.
        injected: positions below this hold injected KV (own, or cached from an equal request).
        making: spans being encoded.
        refused: record name -> reason.
        error: why the order was ignored.
    """

    order: wire.Order
    match: Match = field(default_factory=Match)
    end: int = 0
    local: int = 0
    injected: int = 0
    making: list[Making] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    error: str | None = None


class SchedulerSide:
    """The duties of vLLM's scheduler-side hooks, in their order of call.

    Args:
        directory: of this engine.
        world_size: how many workers must report a record before it is published.
        unsupported: reasons why this model's KV cannot be moved; if any, every order is answered with them.
        key: orders must be signed with it; None obeys everybody.
        record_dtype: in which workers store records.
        preamble: its record, if the engine has one, is in the directory.
    """

    def __init__(
        self,
        directory: Directory,
        world_size: int,
        unsupported: Sequence[str],
        key: bytes | None = None,
        record_dtype: str = AUTO,
        preamble: Segment | None = None,
    ) -> None:
        self.directory = directory
        self._key = key
        self._world_size = world_size
        self._unsupported = tuple(unsupported)
        self._record_dtype = record_dtype
        self._preamble = preamble
        self._jobs: dict[str, Job] = {}
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._loads: list[Load] = []
        self._reported: dict[int, int] = {}
        self._deviations: dict[str, float] = {}
        self._load_errors = 0

    # A request arrives.

    def on_new_request(self, request: Request) -> None:
        """Read the order, pin what it will inject, reserve what it will make, and salt its blocks."""
        if not isinstance(request.kv_transfer_params, Mapping) or wire.KEY not in request.kv_transfer_params:
            return
        job = self._jobs[request.request_id] = self._read(request, request.kv_transfer_params)
        if job.error is not None:
            self.directory.counters["refused"] += 1
            return
        if job.order.op == "drop":
            self.directory.drop(job.order.handles)
        elif job.order.op in ("inject", "encode", "probe"):
            self._prepare(request, job)

    def _read(self, request: Request, params: Mapping[str, Any]) -> Job:
        """The order, or why it is not obeyed. Nothing of an order that is not signed is looked at."""
        if self._key is not None and not wire.is_signed(params, request.prompt_token_ids or (), self._key):
            return Job(wire.Order("inject"), error=wire.UNSIGNED)
        try:
            order = wire.parse(params, request.num_prompt_tokens)
        except InputError as error:
            return Job(wire.Order("inject"), error=str(error))
        assert order is not None
        return Job(order, error=self._cannot(request, order))

    def _cannot(self, request: Request, order: wire.Order) -> str | None:
        if order.op in ("drop", "status", "report"):
            return None
        if self._unsupported:
            return "; ".join(self._unsupported)
        if request.prompt_token_ids is None or request.mm_features:
            return "only prompts of plain token ids can carry memories"
        if request.lora_request is not None:
            return "records are made by the base model and do not fit a LoRA adapter"
        return None

    def _prepare(self, request: Request, job: Job) -> None:
        tokens = request.prompt_token_ids
        assert tokens is not None
        job.match = self.directory.match(_context(job.order, tokens), job.order.scope, job.order.store)
        if request.skip_reading_prefix_cache:
            reason = "the request reads no cached tokens (prompt_logprobs or skip_reading_prefix_cache)"
            injectable = [Miss(r.handle or r.name, reason) for r in job.match.records]
            job.match = Match((), 0, (*injectable, *job.match.missed))
        self.directory.pin(job.match.records)
        job.end = min(job.match.length, request.num_prompt_tokens - 1)
        for span in job.order.spans:
            self._reserve(job, span, tokens)
        if job.end or job.making:
            _salt(request, self._salt(request, job))
        if job.order.op == "inject":
            self.directory.counters["missed"] += len(job.match.missed)

    def _reserve(self, job: Job, span: Span, tokens: Sequence[int]) -> None:
        if self._key is not None and not may_name(span.record, span.handle):
            job.refused[span.record] = FORGED
            return
        try:
            record = self.directory.reserve(
                span.record, tokens[span.start : span.end], span.handle, span.scope, job.order.store
            )
        except BudgetError as error:
            job.refused[span.record] = str(error)
        else:
            # Held until the request is finished: should the record be dropped meanwhile, its pages must not become
            # another's while what is computed for it is still being kept there.
            self.directory.pin([record])
            job.making.append(Making(record, span))

    def _salt(self, request: Request, job: Job) -> str:
        """Never equal for two requests whose cached blocks could differ in content.

        An encode gets one of its own: its tokens must all be computed, so that they can be captured.
        """
        content = {
            "owner": job.order.scope.key if job.order.scope else None,
            "store": job.order.store,
            "records": [[record.name, record.generation] for record in job.match.records],
            "end": job.end,
            "own": request.request_id if job.making else None,
            "epoch": self._load_errors,
            "given": request.cache_salt,
        }
        return "inferscale-" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    # The scheduler asks, allocates, and builds a step.

    def num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens to inject beyond those the engine has; called any number of times, changes nothing else."""
        job = self._jobs.get(request.request_id)
        if job is None or not job.end:
            return 0
        job.local = num_computed_tokens
        return max(0, job.end - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are there: queue the load."""
        job = self._jobs.get(request.request_id)
        if job is None or not job.end:
            return
        job.injected = min(job.end, job.local + num_external_tokens)
        if num_external_tokens == 0:
            return
        start, rows, position = job.end - num_external_tokens, [], 0
        for record in job.match.records:
            first, last = max(position, start), min(position + len(record.token_ids), job.end)
            if first < last:
                rows.append(Rows(record.pages, first - position, last - first, first))
            position += len(record.token_ids)
        self._loads.append(Load(tuple(rows), blocks.get_block_ids()))

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Everything the workers have to move in this step."""
        step = StepMetadata(loads=self._loads, erase=self.directory.take_erased())
        self._loads = []
        making = [(name, job) for name, job in self._jobs.items() if job.making and name in output.num_scheduled_tokens]
        if not making:
            return step
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        block_state = output.kv_connector_block_state
        assert block_state is not None
        for name, job in making:
            first = computed[name]
            last = first + output.num_scheduled_tokens[name]
            block_table = block_state.resolve_block_ids(name)
            parts = (_capture(span, first, last, block_table, job.order.op == "probe") for span in job.making)
            step.captures += [part for part in parts if part is not None]
        return step

    # A step is done, a request is done.

    def update_output(self, report: WorkerReport | None, invalid_block_ids: Any) -> None:
        """Publish what all workers have."""
        if invalid_block_ids:
            # Recomputed blocks stay cached under the old salt with content that no later request would expect.
            self._load_errors += 1
            logger.warning("%d blocks failed to load; their requests were recomputed", len(invalid_block_ids))
        if report is None:
            return
        self._deviations.update(report.deviations)
        for generation, count in report.done.items():
            self._reported[generation] = self._reported.get(generation, 0) + count
            if self._reported[generation] >= self._world_size:
                del self._reported[generation]
                self.directory.publish(generation)

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Let go of what the request held, and answer it."""
        job = self._jobs.pop(request.request_id, None)
        if job is None:
            return None
        self.directory.unpin(job.match.records)
        for making in job.making:
            if making.record.dropped:
                job.refused[making.record.name] = DROPPED
            elif making.covered < len(making.record.token_ids):
                self.directory.abandon(making.record.generation)
                job.refused[making.record.name] = "the request ended before the record was complete"
        self.directory.unpin([making.record for making in job.making])
        answer = self._answer(job)
        if job.order.op != "report":
            self.directory.counters["tokens_injected"] += answer.get("tokens_injected", 0)
            self.directory.counters["injected"] += answer.get("facts_injected", 0)
            self._keep(job.order.ticket, answer)
        return {wire.KEY: {"v": wire.VERSION, "op": job.order.op, **answer}}

    def _answer(self, job: Job) -> dict[str, Any]:
        if job.error is not None:
            return {"error": job.error}
        if job.order.op == "status":
            return self._status()
        if job.order.op == "report":
            return self._report(job.order.ticket)
        if job.order.op == "drop":
            return {}
        facts, missed = _facts_injected(job)
        if job.order.op == "inject":
            return {"tokens_injected": job.injected, "facts_injected": facts, "missed": wire.missed_to_wire(missed)}
        return {
            "tokens_injected": job.injected,
            "encoded": [m.record.name for m in job.making if m.record.name not in job.refused],
            "refused": job.refused,
            "based_on": [record.name for record in job.match.records] if job.injected else [],
        }

    def _keep(self, ticket: str, answer: dict[str, Any]) -> None:
        """For ``report``: vLLM finds stop strings outside of its core, then aborts; nobody hears the answer to that."""
        if ticket:
            self._kept[ticket] = answer
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def _report(self, ticket: str) -> dict[str, Any]:
        """The answer to another request. The abort may still be on its way: then from what has happened so far."""
        running = (job for job in self._jobs.values() if job.order.ticket == ticket and job.order.op == "inject")
        if (job := next(running, None)) is not None:
            return self._answer(job)
        return self._kept.pop(ticket, {"error": "nothing is known of this request any more"})

    def _status(self) -> dict[str, Any]:
        return {
            "records": self.directory.records,
            "tokens": self.directory.tokens,
            "bytes": self.directory.bytes,
            "bytes_per_token": self.directory.page_bytes // self.directory.page_size,
            "capacity": self.directory.num_pages * self.directory.page_bytes,
            "counters": dict(self.directory.counters),
            "unsupported": list(self._unsupported),
            "deviations": dict(self._deviations),
            "verifies_handles": self.directory.verify is not None,
            "record_dtype": self._record_dtype,
            "preamble": [self._preamble.record, list(self._preamble.token_ids)] if self._preamble else None,
        }


def _context(order: wire.Order, tokens: Sequence[int]) -> list[Wanted]:
    """The segments that may be injected: in an encode those before its first span, whose tokens must be computed."""
    limit = order.spans[0].start if order.spans else len(tokens)
    wanted, position = [], 0
    for segment in order.segments:
        end = position + segment.length
        if end > limit:
            break
        wanted.append(Wanted(tuple(tokens[position:end]), segment.record, segment.handle))
        position = end
    return wanted


def _capture(making: Making, first: int, last: int, block_table: Any, probe: bool) -> Capture | None:
    span = making.span
    start, end = max(first, span.start), min(last, span.end)
    if start >= end:
        return None
    making.covered = max(making.covered, end - span.start)
    rows = Rows(making.record.pages, start - span.start, end - start, start)
    return Capture(making.record.generation, rows, block_table, end == span.end, probe)


def _facts_injected(job: Job) -> tuple[int, list[Miss]]:
    """Facts whose KV came from their record, the last token of a prompt not counted; and all others, with reasons."""
    facts, missed, position = 0, list(job.match.missed), 0
    for record in job.match.records:
        position += len(record.token_ids)
        if position - job.injected <= 1:
            facts += record.handle is not None
        else:
            missed.append(Miss(record.handle or record.name, LAST))
    return facts, missed


def _salt(request: Request, salt: str) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
