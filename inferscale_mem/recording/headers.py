"""Records of prompt headers: made on first use, once each, whoever asks first."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

from inferscale_mem.errors import EngineClosedError, EngineError, InputError
from inferscale_mem.protocols import Engine
from inferscale_mem.types import EncodePlan, EncodeReport, Segment, Span

logger = logging.getLogger(__name__)

KEPT = 64
"""Headers remembered. An app that puts a clock into its system prompt makes a new header with every request."""


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
        while True:
            future, mine = self._claim(header)
            if mine:
                return self._make(header, future)
            if (known := future.result()) is not None:
                return known

    async def aensure(self, header: Segment) -> bool:
        """As ensure, on any event loop."""
        while True:
            future, mine = self._claim(header)
            if mine:
                return await self._amake(header, future)
            if not future.done():
                await asyncio.wrap_future(future)  # It counts as running, so this caller cannot cancel it for others.
            if (known := future.result()) is not None:
                return known

    def forget(self, record: str) -> None:
        """The engine no longer has this record."""
        with self._lock:
            future = self._known.get(record)
            if future is not None and future.done():
                del self._known[record]

    def _make(self, header: Segment, future: Future[bool | None]) -> bool:
        try:
            report = self._engine.encode(_plan(header))
        except CancelledError as error:
            closed = EngineClosedError("The engine was closed while it encoded a header.")
            self._give_up(header, future, closed)
            raise closed from error
        except BaseException as error:
            if self._give_up(header, future, error):
                return False
            raise
        return self._settle(header, future, report)

    async def _amake(self, header: Segment, future: Future[bool | None]) -> bool:
        try:
            report = await self._engine.aencode(_plan(header))
        except BaseException as error:
            if self._give_up(header, future, error):
                return False
            raise
        return self._settle(header, future, report)

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
                self._fail(record, str(error))
        if expected:
            future.set_result(False)
        elif isinstance(error, Exception):
            future.set_exception(error)
        else:
            future.set_result(None)  # Whoever waits tries again itself.
        return expected

    def _fail(self, record: str, reason: str) -> None:
        earlier = self._failed.get(record)
        attempts = earlier.attempts + 1 if earlier else 1
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        logger.log(level, "A header has no record; requests with it are prefilled as text: %s", reason)
        until = time.monotonic() + self._backoff_s * 2 ** min(attempts - 1, 16)
        self._failed[record] = _Failure(reason, attempts, until)
        self._failed.move_to_end(record)
        while len(self._failed) > KEPT:
            self._failed.popitem(last=False)

    def _trim(self) -> None:
        surplus = len(self._known) - KEPT
        for record in [r for r, future in self._known.items() if future.done()][: max(0, surplus)]:
            del self._known[record]


def _plan(header: Segment) -> EncodePlan:
    # Without its record's id: what is to be made is not to be read, should the engine have it after all.
    return EncodePlan((replace(header, record=None),), (Span(str(header.record), 0, len(header.token_ids)),))


def _settled(value: bool) -> Future[bool | None]:
    future: Future[bool | None] = Future()
    future.set_result(value)
    return future
