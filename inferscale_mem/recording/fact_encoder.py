"""From a fact's handle to a record in the engine: one at a time, no state, no threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from inferscale_mem.encoding import Policy, encode_plan
from inferscale_mem.handles import HandleSigner, split
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.protocols import Engine, FactIndex
from inferscale_mem.recording.headers import HeaderRecords
from inferscale_mem.recording.jobs import Job, made_at, oldest_first, rebuild_order
from inferscale_mem.recording.ledger import rounded
from inferscale_mem.types import EncodePlan, Fact

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of a fact's encode.

    Attributes:
        refused: why the engine did not keep the record; None if it did.
        context: handles of the facts it was encoded behind.
        age: when the fact was made, in seconds since 1970.
        tokens_prefilled: tokens the engine computed.
        tokens_injected: tokens of context that came from records.
        seconds: that the engine took.
    """

    refused: str | None
    context: frozenset[str]
    age: float
    tokens_prefilled: int
    tokens_injected: int
    seconds: float


class FactEncoder:
    """Encodes facts by handle.

    Args:
        engine, index, signer, planner, policy: as of the recorder.
        headers: makes the header that facts are encoded behind.
    """

    def __init__(
        self,
        engine: Engine,
        index: FactIndex,
        signer: HandleSigner,
        planner: PromptPlanner,
        policy: Policy,
        headers: HeaderRecords,
    ) -> None:
        self._engine = engine
        self._index = index
        self._signer = signer
        self._planner = planner
        self._policy = policy
        self._headers = headers

    def job(self, fact: Fact) -> Job:
        """The job that encodes this revision of a fact."""
        return Job(self._signer.mint(fact), fact.id, made_at(fact))

    def jobs(self, facts: Iterable[Fact]) -> list[Job]:
        """Jobs for facts, oldest first."""
        return [self.job(fact) for fact in oldest_first(facts)]

    def backlog(self, room: int | None) -> list[Job]:
        """Jobs for all live facts, as far as ``room`` tokens go, in the order of ``rebuild_order``."""
        facts = self._index.facts()
        size: Callable[[Fact], int] = lambda fact: rounded(self._planner.fact_tokens(fact.text))  # noqa: E731
        order = rebuild_order(facts, size, room, self._index.last_used)
        logger.info("Encoding %d of %d facts in the background", len(order), len(facts))
        return [self.job(fact) for fact in order]

    def alive(self, handles: Iterable[str]) -> list[str]:
        """Those of these lasting handles whose facts the index has."""
        found = {handle: self._index.by_handle_id(split(handle)[0]) for handle in handles}
        return [handle for handle, fact in found.items() if fact is not None and self._signer.mint(fact) == handle]

    def encode(self, job: Job, is_ready: Callable[[str], bool]) -> Outcome | None:
        """Encode a job's fact; None if the index does not have it (any more).

        Args:
            job: names the fact.
            is_ready: whether a record (by id) can be injected as context.

        Raises:
            InputError, ModelError: it can never be encoded as it is.
            EngineClosedError: the engine is closed.
            Exception: whatever index and engine raise.
        """
        fact = self._index.get(job.fact_id) if job.fact_id else self._index.by_handle_id(split(job.handle)[0])
        if fact is None or self._signer.mint(fact) != job.handle:
            return None
        preamble = self._engine.info.preamble
        plan = encode_plan(
            self._policy,
            fact,
            job.handle,
            self._index,
            self._planner,
            self._signer.mint,
            max_tokens=self._engine.info.max_model_len - 1,  # An encode request makes one token, which is not kept.
            is_ready=is_ready,
            preamble=preamble,
        )
        for segment in plan.segments:
            if segment.kind == "header" and segment is not preamble:
                self._headers.ensure(segment)
        began = time.perf_counter()
        report = self._engine.encode(_unread(plan))
        seconds = time.perf_counter() - began
        record = self._planner.record_id(job.handle)
        refused = None if record in report.encoded else report.refused.get(record, "the engine did not keep it")
        if refused is None and preamble in plan.segments and preamble.record not in report.based_on:
            self._engine.drop([job.handle])  # it stands on the header's own tokens, computed in the preamble's place
            refused = "the engine has lost the preamble; start it again"
        # Context that was prefilled as text has been seen no less than context that was injected.
        context = frozenset(s.handle for s in plan.segments if s.handle is not None and s.handle != job.handle)
        return Outcome(refused, context, made_at(fact), report.tokens_prefilled, report.tokens_injected, seconds)


def _unread(plan: EncodePlan) -> EncodePlan:
    """What is to be made is not to be read, should the engine have it already: from an earlier recorder, say."""
    made = {span.record for span in plan.spans}
    return replace(plan, segments=tuple(replace(s, record=None) if s.record in made else s for s in plan.segments))
