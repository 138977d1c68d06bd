"""What the recorder knows: which records are ready, which facts are queued, failed, or stand on which. No threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from inferscale_mem.kv.directory import PAGE_SIZE
from inferscale_mem.recording.backoff import delay_s
from inferscale_mem.recording.dependence import Dependence
from inferscale_mem.recording.jobs import Job, JobQueue
from inferscale_mem.types import PromptPlan


@dataclass(frozen=True)
class Progress:
    """Facts dealt with since the queue was last empty (encoded, refused, given up, withdrawn), of how many."""

    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.done} of {self.total} facts encoded"


@dataclass(frozen=True)
class Failure:
    """Why a fact has no record, and how often it was tried."""

    reason: str
    attempts: int


@dataclass(frozen=True)
class Kept:
    """A record that is ready: the job that made it, and how many had been made then."""

    job: Job
    moment: int


@dataclass(eq=False)
class Flight:
    """The encode that is under way, and what happened to its fact and to others meanwhile.

    Attributes:
        job: the fact.
        removed: handles whose records went since it began.
        dead: its own fact was removed.
    """

    job: Job
    removed: set[str] = field(default_factory=set)
    dead: bool = False

    def spoiled(self, context: Iterable[str]) -> bool:
        """Whether a record made behind the facts ``context`` must go: something it is made of is gone by now."""
        return self.dead or not self.removed.isdisjoint({self.job.handle, *context})


class Ledger:
    """The recorder's state, at most one encode in flight. Callers lock; only ``is_ready`` needs no lock.

    Args:
        record_id: handle -> id of its record.
        attempts: how often a fact is tried.
        backoff_s: seconds before the second attempt; doubles with each further one.
    """

    def __init__(self, record_id: Callable[[str], str], *, attempts: int, backoff_s: float) -> None:
        self._record_id = record_id
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._ready: dict[str, Kept] = {}
        self._dependence = Dependence()
        self._failed: dict[str, Failure] = {}
        self._total = 0
        self.queue = JobQueue()
        self.flight: Flight | None = None
        self.counters: Counter[str] = Counter()
        self.moment = 0
        """Records made so far: tells what was ready before something else began."""

    # What there is.

    def is_ready(self, record: str) -> bool:
        """Whether the record was made, and nothing is known to have happened to it since."""
        return record in self._ready

    def ready_job(self, handle: str) -> Job | None:
        """The job that made the record which a handle of either form names, if it is ready."""
        kept = self._ready.get(self._record_id(handle))
        return kept.job if kept is not None else None

    @property
    def pending(self) -> int:
        """Facts queued or in flight."""
        return len(self.queue) + (self.flight is not None)

    @property
    def progress(self) -> Progress:
        """How far the current queue is."""
        return Progress(max(0, self._total - self.pending), self._total)

    @property
    def failures(self) -> dict[str, str]:
        """Handle -> reason."""
        return {handle: failure.reason for handle, failure in self._failed.items()}

    def failure(self, handle: str) -> str | None:
        """Why the last try at a fact failed; None if it did not."""
        failure = self._failed.get(handle)
        return failure.reason if failure else None

    # Wanting and encoding.

    def want(self, job: Job, *, known: bool = False, backlog: bool = False) -> None:
        """Queue a job, unless its record is ready or being made (``known``: even then)."""
        if not known and self._record_id(job.handle) in self._ready:
            return
        flight = self.flight
        if flight and flight.job.handle == job.handle and not flight.dead and job.handle not in flight.removed:
            return
        if self.pending == 0:
            self._total = 0
        self._total += self.queue.put(job, backlog=backlog)

    def want_asked(self, plan: PromptPlan, lost: Container[str], room: int | None, since: int) -> None:
        """Queue the facts of a request that had no record, those in ``lost`` included.

        Only as many as fit in ``room`` tokens beside the records that the request does have, the most similar first.
        Failed ones get another try, but no more than all tries together.

        Args:
            plan: the request.
            lost: what the engine did not have, by handle; evicted, if it was ready before the request began.
            room: tokens that the engine can hold; None for no limit.
            since: the moment at which the request began.
        """
        held = [s for s in plan.segments if s.record is not None and (s.handle or s.record) not in lost]
        there = {segment.record for segment in held}
        missing = [fact for fact in plan.facts if fact.record not in there]
        for fact in missing:
            kept = self._ready.get(fact.record) if fact.record else None
            if fact.record and kept and kept.moment <= since:
                del self._ready[fact.record]
                self.counters["evicted"] += 1
        left = None if room is None else room - sum(rounded(segment.token_ids) for segment in held)
        for fact in reversed(missing):
            failure = self._failed.get(fact.handle or "")
            if fact.handle is None or (failure and failure.attempts >= self._attempts):
                continue
            if left is not None and (left := left - rounded(fact.token_ids)) < 0:
                break
            self.want(Job(fact.handle))

    def pardon(self, handle: str) -> None:
        """Forget earlier failures of a fact."""
        self._failed.pop(handle, None)

    def begin(self, now: float) -> Flight | None:
        """Take the next job that is due."""
        job = self.queue.pop(now)
        self.flight = Flight(job) if job else None
        return self.flight

    def end(self) -> None:
        """Nothing is in flight any more."""
        self.flight = None

    def keep(self, flight: Flight, age: float, context: Iterable[str]) -> None:
        """The record was made behind the facts ``context``."""
        job = replace(flight.job, age=age, due=0.0)
        self.moment += 1
        self._ready[self._record_id(job.handle)] = Kept(job, self.moment)
        self._dependence.put(job.handle, context)
        self._failed.pop(job.handle, None)
        self.counters["encoded"] += 1

    def redo(self, flight: Flight) -> None:
        """What came out was spoiled and is dropped: at once again, before newer facts, unless its fact is gone."""
        self.counters["spoiled"] += 1
        if not flight.dead:
            self.queue.put(flight.job, first=True)

    def refuse(self, flight: Flight, reason: str) -> None:
        """The engine said no: not tried again until somebody asks for it, and only a few times then."""
        if not flight.dead:
            self.counters["refused"] += 1
            self._note(flight.job.handle, reason, 1)

    def fail(self, flight: Flight, reason: str, now: float, *, final: bool = False) -> None:
        """Something broke: tried again by itself, later and later, a few times (``final``: never)."""
        if flight.dead:
            return
        self.counters["failed"] += 1
        attempts = self._note(flight.job.handle, reason, self._attempts if final else 1)
        if attempts < self._attempts:
            self.queue.rest(flight.job, now + delay_s(self._backoff_s, attempts))

    def _note(self, handle: str, reason: str, at_least: int) -> int:
        earlier = self._failed.get(handle)
        attempts = max(at_least, earlier.attempts + 1 if earlier else 1)
        self._failed[handle] = Failure(reason, attempts)
        return attempts

    # Losing.

    def standing_on(self, handles: Iterable[str]) -> set[str]:
        """Further facts whose records have seen one of these."""
        return self._dependence.standing_on(handles)

    def withdraw(self, handles: Sequence[str]) -> tuple[list[str], list[Job]]:
        """These facts are gone: nothing of theirs is ready or queued, nor is anything ready that has seen them.

        Returns:
            Handles whose records the engine must drop, and jobs for ``dropped``: ready until now, to be made again.
        """
        standing = self.standing_on(handles)
        doomed = [*handles, *sorted(standing)]
        records = [self._record_id(handle) for handle in doomed]
        lost = [kept.job for record in records if (kept := self._ready.pop(record, None))]
        again = [job for job in lost if job.handle in standing]
        for handle in handles:
            self.queue.discard(handle)
            self._failed.pop(handle, None)
        self._dependence.forget(doomed)
        if self.flight:
            self.flight.removed.update(doomed)
            self.flight.dead |= self.flight.job.handle in handles
        return doomed, again

    def dropped(self, doomed: Sequence[str], again: Iterable[Job]) -> None:
        """The engine has dropped what ``withdraw`` said; whatever of it was made meanwhile has gone with it.

        It is made again behind new facts, of which there is no record yet at all, but before that if it is asked for.
        """
        lost = [kept.job for handle in doomed if (kept := self._ready.pop(self._record_id(handle), None))]
        if self.flight and self.flight.job.handle in doomed:
            self.flight.removed.add(self.flight.job.handle)
        for job in sorted([*again, *lost], key=lambda job: job.age):
            self.counters["again"] += 1
            self.want(job, backlog=True)


def rounded(token_ids: Sequence[int]) -> int:
    """Tokens of the budget that a record of these takes."""
    return -(-len(token_ids) // PAGE_SIZE) * PAGE_SIZE
