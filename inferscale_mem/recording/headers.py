"""Records of prompt headers: made on first use, once each, whoever asks first."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import cast

from inferscale_mem.errors import EngineAwayError, EngineClosedError, EngineError, InputError
from inferscale_mem.protocols import Engine
from inferscale_mem.recording.backoff import delay_s
from inferscale_mem.types import EncodePlan, EncodeReport, Segment, Span

logger = logging.getLogger(__name__)

KEPT = 1024
"""Headers remembered, each turn of a conversation being one. An app that
puts a clock into its system prompt makes a new header with every request."""


Steps = Generator[Future[bool | None] | EncodePlan, EncodeReport | None, tuple[bool, int]]


@dataclass(frozen=True)
class _Failure:
    reason: str
    attempts: int
    until: float


class HeaderRecords:
    """Which headers the engine holds a record of, as far as is known here; the engine may have evicted some.

    A header that cannot be kept is no error: requests go on without, and their reports show it. Thread-safe.

    Args:
        engine: makes the records.
        backoff_s: seconds between the first two attempts at a header that failed; doubles with each further one.
        room: tokens of the engine's budget; None for no limit.
    """

    def __init__(self, engine: Engine, *, backoff_s: float, room: int | None) -> None:
        self._engine = engine
        self._backoff_s = backoff_s
        self._room = room
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[bool | None]] = OrderedDict()
        self._failed: OrderedDict[str, _Failure] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return len(self._known)

    @property
    def failures(self) -> dict[str, str]:
        """Record id -> why it could not be made."""
        with self._lock:
            return {record: failure.reason for record, failure in self._failed.items()}

    def ensure(self, header: Segment) -> bool:
        """Wait until the header's record is at hand; False if it cannot be made now.

        Raises:
            EngineClosedError: the engine is closed.
        """
        return self.ensure_all([header])[0]

    async def aensure(self, header: Segment) -> bool:
        """As ensure, on any event loop."""
        return (await self.aensure_all([header]))[0]

    def ensure_all(self, headers: Sequence[Segment]) -> tuple[bool, int]:
        """Wait until a prompt's leading headers all have records, each made on top of those before it.

        Returns:
            Whether they have, and how many tokens were computed for it here.

        Raises:
            EngineClosedError: the engine is closed.
        """
        steps = self._steps(headers)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Future):
                    step.result()
                    step = next(steps)
                    continue
                try:
                    report = self._engine.encode(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(report)
        except StopIteration as end:
            return cast(tuple[bool, int], end.value)

    async def aensure_all(self, headers: Sequence[Segment]) -> tuple[bool, int]:
        """As ensure_all, on any event loop."""
        steps = self._steps(headers)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Future):
                    await asyncio.wrap_future(step)  # It counts as running: this caller cannot cancel it for others.
                    step = next(steps)
                    continue
                try:
                    report = await self._engine.aencode(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(report)
        except StopIteration as end:
            return cast(tuple[bool, int], end.value)

    def _steps(self, headers: Sequence[Segment]) -> Steps:
        """What to do next, one thing after the other: wait for a future, or encode a plan and send its report."""
        made = at = 0
        while at < len(headers):
            future, mine = self._claim(headers[at])
            if not mine:
                if not future.done():
                    yield future
                known = future.result()
                if known is False:
                    return False, made
                at += known is True  # else whoever made it gave up: try it here
                continue
            claimed = [future]
            while at + len(claimed) < len(headers):
                future, mine = self._claim(headers[at + len(claimed)])
                if not mine:
                    break
                claimed.append(future)
            making = headers[at : at + len(claimed)]
            report = yield from self._encoded(headers[:at], making, claimed)
            if report is None:
                return False, made
            made += report.tokens_prefilled
            if not all([self._settle(*pair, report) for pair in zip(making, claimed, strict=True)]):
                return False, made
            at += len(making)
        return True, made

    def _encoded(
        self, before: Sequence[Segment], making: Sequence[Segment], claimed: Sequence[Future[bool | None]]
    ) -> Generator[EncodePlan, EncodeReport, EncodeReport | None]:
        """The report of encoding some headers; None if the request can go on without."""
        try:
            return (yield _plan(before, making))
        except BaseException as raised:
            error: BaseException = raised
            if isinstance(raised, CancelledError):
                error = EngineClosedError("The engine was closed while it encoded a header.")
            goes_on = [self._give_up(*pair, error) for pair in zip(making, claimed, strict=True)]
            if all(goes_on):
                return None
            if error is raised:
                raise
            raise error from raised

    def forget(self, record: str) -> None:
        """The engine no longer has this record."""
        with self._lock:
            future = self._known.get(record)
            if future is not None and future.done():
                del self._known[record]

    def _claim(self, header: Segment) -> tuple[Future[bool | None], bool]:
        """The future that says whether the record is there, and whether it is the caller's task to make it."""
        record = header.record
        with self._lock:
            if record is None or not self._possible(header, record):
                return _settled(False), False
            future = self._known.get(record)
            if future is not None:
                self._known.move_to_end(record)
                return future, False
            future = Future()
            future.set_running_or_notify_cancel()
            self._known[record] = future
            self._trim()
            return future, True

    def _possible(self, header: Segment, record: str) -> bool:
        if not self._engine.info.connector or not header.token_ids:
            return False
        if self._room is not None and len(header.token_ids) > self._room:
            self._fail(record, f"a header of {len(header.token_ids)} tokens is more than the record budget holds")
            return False
        failure = self._failed.get(record)
        return failure is None or failure.until <= time.monotonic()

    def _settle(self, header: Segment, future: Future[bool | None], report: EncodeReport) -> bool:
        record = str(header.record)
        made = record in report.encoded
        with self._lock:
            if made:
                self._failed.pop(record, None)
            else:
                self._known.pop(record, None)
                self._fail(record, report.refused.get(record, "the engine did not keep it"))
        future.set_result(made)
        return made

    def _give_up(self, header: Segment, future: Future[bool | None], error: BaseException) -> bool:
        """Let others go on; True if the request can go on as well, without the record."""
        record = str(header.record)
        expected = isinstance(error, EngineError | InputError) and not isinstance(error, EngineClosedError)
        with self._lock:
            self._known.pop(record, None)
            if expected:
                self._fail(record, str(error), counts=not isinstance(error, EngineAwayError))
        if expected:
            future.set_result(False)
        elif isinstance(error, Exception):
            future.set_exception(error)
        else:
            future.set_result(None)  # Whoever waits tries again itself.
        return expected

    def _fail(self, record: str, reason: str, *, counts: bool = True) -> None:
        earlier = self._failed.get(record)
        attempts = (earlier.attempts if earlier else 0) + counts
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        logger.log(level, "A header has no record; requests with it are prefilled as text: %s", reason)
        until = time.monotonic() + delay_s(self._backoff_s, attempts)
        self._failed[record] = _Failure(reason, attempts, until)
        self._failed.move_to_end(record)
        while len(self._failed) > KEPT:
            self._failed.popitem(last=False)

    def _trim(self) -> None:
        surplus = len(self._known) - KEPT
        for record in [r for r, future in self._known.items() if future.done()][: max(0, surplus)]:
            del self._known[record]


def _plan(before: Sequence[Segment], making: Sequence[Segment]) -> EncodePlan:
    # Without their records' ids: what is to be made is not to be read, should the engine have it after all.
    start, spans = sum(len(segment.token_ids) for segment in before), []
    for segment in making:
        spans.append(Span(str(segment.record), start, start + len(segment.token_ids)))
        start += len(segment.token_ids)
    return EncodePlan((*before, *(replace(segment, record=None) for segment in making)), tuple(spans))


def _settled(value: bool) -> Future[bool | None]:
    future: Future[bool | None] = Future()
    future.set_result(value)
    return future
