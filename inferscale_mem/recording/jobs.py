"""The recorder's queue: which fact is encoded next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from inferscale_mem.types import Fact, Scope


@dataclass(frozen=True)
class Job:
    """A fact to encode.

    Attributes:
        handle: of the revision that is wanted.
        fact_id: the store's id, or None where only the handle is known.
        age: when the fact was made, in seconds since 1970; 0 if unknown.
        due: not before this time, on the queue's clock.
    """

    handle: str
    fact_id: str | None = None
    age: float = 0.0
    due: float = 0.0


class JobQueue:
    """At most one job per handle. First those somebody waits for, then the backlog; each in order of arrival.

    Not thread-safe: callers lock.
    """

    def __init__(self) -> None:
        self._soon: dict[str, Job] = {}
        self._later: dict[str, Job] = {}
        self._resting: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._soon) + len(self._later) + len(self._resting)

    def __contains__(self, handle: object) -> bool:
        return handle in self._soon or handle in self._later or handle in self._resting

    def put(self, job: Job, *, backlog: bool = False, first: bool = False) -> bool:
        """Queue a job; returns whether its handle is new here. One that is wanted now moves ahead of the backlog.

        Args:
            job: for which fact.
            backlog: nobody waits for it.
            first: ahead of all others.
        """
        new = job.handle not in self
        if backlog:
            if new:
                self._later[job.handle] = job
        elif job.handle not in self._soon:
            self.discard(job.handle)
            if first:
                self._soon = {job.handle: job, **self._soon}
            else:
                self._soon[job.handle] = job
        return new

    def rest(self, job: Job, due: float) -> None:
        """Queue a job that is not to be tried before ``due``, unless it is wanted again meanwhile."""
        if job.handle not in self:
            self._resting[job.handle] = replace(job, due=due)

    def discard(self, handle: str) -> None:
        """Take a handle's job out, if there is one."""
        for lane in (self._soon, self._later, self._resting):
            lane.pop(handle, None)

    def clear(self) -> None:
        """Take all jobs out."""
        for lane in (self._soon, self._later, self._resting):
            lane.clear()

    def pop(self, now: float) -> Job | None:
        """The next job, or None if all that are left are resting."""
        for job in [job for job in self._resting.values() if job.due <= now]:
            del self._resting[job.handle]
            self._soon[job.handle] = job
        for lane in (self._soon, self._later):
            if lane:
                return lane.pop(next(iter(lane)))
        return None

    def rest_until(self) -> float | None:
        """When the first resting job is due; None if none is resting."""
        return min((job.due for job in self._resting.values()), default=None)


def made_at(fact: Fact) -> float:
    """When a fact was made, in seconds since 1970; 0 if it does not say."""
    try:
        time = datetime.fromisoformat(fact.created_at)
    except ValueError:
        return 0.0
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def oldest_first(facts: Iterable[Fact]) -> list[Fact]:
    """Facts in the order in which they are encoded: a fact's context is made of older ones. Ties keep their order."""
    return sorted(facts, key=made_at)


def rebuild_order(
    facts: Iterable[Fact],
    size: Callable[[Fact], int],
    room: int | None,
    used: Callable[[Scope], float] = lambda scope: 0.0,
) -> list[Fact]:
    """Which facts to encode after a start, and in which order.

    Owners who were here last come first, by their use of the memory or by their newest fact: they are the ones most
    likely to be talking. Within an owner oldest
    first, so that each fact finds the records it is encoded on. What does not fit in ``room`` is left out, an owner's
    oldest facts first: encoding it would push out what was encoded before.

    Args:
        facts: all live facts, of any number of owners.
        size: room that a fact's record takes.
        room: how much there is; None for no limit.
        used: when facts of exactly a scope were last added or asked for; 0 if unknown.
    """
    owners: dict[str, list[Fact]] = {}
    for fact in oldest_first(facts):
        owners.setdefault(fact.scope.key, []).append(fact)
    order: list[Fact] = []
    for chain in sorted(owners.values(), key=lambda c: max(made_at(c[-1]), used(c[-1].scope)), reverse=True):
        fitting: list[Fact] = []
        for fact in reversed(chain):
            if room is not None:
                if size(fact) > room:
                    break
                room -= size(fact)
            fitting.append(fact)
        order += reversed(fitting)
    return order
