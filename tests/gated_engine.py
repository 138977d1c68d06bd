"""An engine around another one whose encodes and drops can be held, made to fail, and looked at."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import replace

from inferscale_mem.protocols import ChatTokenizer, Engine
from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.types import (
    Chunk,
    EncodePlan,
    EncodeReport,
    EngineInfo,
    EngineStatus,
    PromptPlan,
    Sampling,
)

PATIENCE = 20.0
"""Seconds after which a test that waits for something has failed; nothing waits that long when all is well."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event announces."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class Gate:
    """Where calls can be held: each arrival can be awaited, and all wait until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._arrivals = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()
        while self._arrivals.acquire(blocking=False):
            pass

    def open(self) -> None:
        self._open.set()

    def arrival(self) -> None:
        """Wait until one more call has arrived since shut()."""
        assert self._arrivals.acquire(timeout=PATIENCE), "nobody came"

    def step(self) -> None:
        """For the call that is held here."""
        self._arrivals.release()
        assert self._open.wait(PATIENCE), "the gate was never opened"


class GatedEngine:
    """See the module.

    Attributes:
        encodes, drops: gates in front of the real calls; ``dropped`` behind that of drop.
        plans: encode plans so far.
        failures: called with a plan; raises to make the encode fail.
        refuse: called with a plan; a reason refuses the encode.
        facts: to override parts of the engine's info.
    """

    def __init__(self, inner: Engine, **info: object) -> None:
        self.inner = inner
        self._info = info
        self.encodes = Gate()
        self.drops = Gate()
        self.dropped = Gate()
        self.plans: list[EncodePlan] = []
        self.dropped_handles: list[str] = []
        self.fail: Callable[[EncodePlan], None] = lambda plan: None
        self.refuse: Callable[[EncodePlan], str | None] = lambda plan: None

    @property
    def info(self) -> EngineInfo:
        return replace(self.inner.info, **self._info)  # type: ignore[arg-type]

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self.inner.tokenizer

    @property
    def encoded(self) -> list[str]:
        """Handles of the facts whose encodes were asked for, in order."""
        return [span.handle for plan in self.plans for span in plan.spans if span.handle]

    @property
    def headers(self) -> list[str]:
        """Record ids of the headers whose encodes were asked for, in order."""
        return [span.record for plan in self.plans for span in plan.spans if not span.handle]

    def _refused(self, plan: EncodePlan) -> EncodeReport | None:
        self.fail(plan)
        reason = self.refuse(plan)
        return EncodeReport((), {span.record: reason for span in plan.spans}, 0, 0) if reason else None

    def encode(self, plan: EncodePlan) -> EncodeReport:
        self.plans.append(plan)
        self.encodes.step()
        return self._refused(plan) or self.inner.encode(plan)

    async def aencode(self, plan: EncodePlan) -> EncodeReport:
        self.plans.append(plan)
        await asyncio.to_thread(self.encodes.step)
        return self._refused(plan) or await self.inner.aencode(plan)

    def generate(self, plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        return self.inner.generate(plan, sampling)

    def agenerate(self, plan: PromptPlan, sampling: Sampling) -> AsyncIterator[Chunk]:
        return self.inner.agenerate(plan, sampling)

    def drop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        self.drops.step()
        self.inner.drop(handles, alive)
        self.dropped_handles += handles
        self.dropped.step()

    async def adrop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        await asyncio.to_thread(self.drop, handles, alive)

    def announce(self, announcement: Announcement) -> Announced:
        return self.inner.announce(announcement)

    def status(self) -> EngineStatus:
        return self.inner.status()

    def close(self) -> None:
        self.inner.close()
