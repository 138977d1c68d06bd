"""Who is at work in a memory: many may be, or one has it to itself; once it is shut nobody comes in."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from inferscale_mem.errors import StoreError

logger = logging.getLogger(__name__)

CLOSED = "The memory is closed; open a new one."


class Visit:
    """One operation, from when it asks to come in until it has left."""

    def __init__(self, gate: Gate, alone: bool, around: Visit | None, loop: asyncio.AbstractEventLoop | None) -> None:
        self.gate = gate
        self.alone = alone
        self.around = around
        """The operation that this one is a part of."""
        self.loop = loop
        """The event loop that it runs on; None in a thread of its own."""
        self.turn: Future[None] = Future()
        """Done when it may come in."""
        self.over = False
        self.afterwards: list[Callable[[], None]] = []
        """What is to be done when it has left."""


_current: contextvars.ContextVar[Visit | None] = contextvars.ContextVar("inferscale-mem0-visit", default=None)


class Gate:
    """First come, first served; but an operation inside another one, in the same thread or task, never waits.

    Thread-safe, and may be used from several event loops at once: whoever has to wait holds a future, not a thread.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end an abandoned operation in the middle of another one's business here.
        self._changed = threading.Condition(threading.RLock())
        self._inside: set[Visit] = set()
        self._queue: deque[Visit] = deque()
        self._shut = False

    def enter(self, *, alone: bool = False) -> Visit:
        """Come in, and wait until that may be; ``leave`` must follow.

        Raises:
            StoreError: it is shut; or to be alone was asked for by a part of an operation that others share.
        """
        visit = self._ask(alone, None)
        try:
            visit.turn.result()
        except BaseException:
            self._give_up(visit)
            raise
        _current.set(visit)
        return visit

    async def enter_async(self, *, alone: bool = False) -> Visit:
        """``enter``, without blocking the event loop."""
        visit = self._ask(alone, asyncio.get_running_loop())
        try:
            if visit.turn.done():
                visit.turn.result()
            else:
                await asyncio.wrap_future(visit.turn)
        except BaseException:
            self._give_up(visit)
            raise
        _current.set(visit)
        return visit

    def leave(self, visit: Visit) -> None:
        """The operation is over; what was put off until then is done now."""
        with self._changed:
            visit.over = True
            self._inside.discard(visit)
            self._let_in()
            self._changed.notify_all()
        for do in visit.afterwards:
            do()

    def afterwards(self, do: Callable[[], None]) -> None:
        """Do this when the operation that the caller is a part of is over; now, if there is none."""
        with self._changed:
            outermost = [visit for visit in _around() if visit.gate is self][-1:]
            for visit in outermost:
                visit.afterwards.append(do)
        if not outermost:
            do()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Around work that may outlive its operation: a task that is cancelled ends while its thread goes on."""
        visit = _current.get()
        around = next((outer for outer in _around() if outer.gate is self), None)
        if visit is None or (around is not None and around.loop is None):
            yield
            return
        inside = self.enter()
        try:
            yield
        finally:
            self.leave(inside)

    def shut(self) -> None:
        """Nobody comes in from now on; those who wait are refused."""
        with self._changed:
            self._shut = True
            while self._queue:
                visit = self._queue.popleft()
                if visit.turn.set_running_or_notify_cancel():
                    visit.turn.set_exception(StoreError(CLOSED))

    def emptied(self, timeout: float) -> bool:
        """Wait until all have left, at most ``timeout`` seconds; whether that is so.

        Those that cannot leave before the caller goes on are not waited for: what it is a part of, and what runs on the
        event loop that it holds up.
        """
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        mine = set(_around())
        with self._changed:
            self._changed.wait_for(
                lambda: all(visit in mine or (visit.loop is not None and visit.loop is loop) for visit in self._inside),
                timeout,
            )
            return not self._inside

    def _ask(self, alone: bool, loop: asyncio.AbstractEventLoop | None) -> Visit:
        with self._changed:
            if self._shut:
                raise StoreError(CLOSED)
            around = next(_around(), None)
            visit = Visit(self, alone, around, loop)
            within = [outer for outer in _around() if outer.gate is self]
            if within and alone and not any(outer.alone for outer in within):
                raise StoreError("reset() was called inside another operation of this memory; call it after that one.")
            if within:
                self._inside.add(visit)
                visit.turn.set_result(None)
            else:
                self._queue.append(visit)
                self._let_in()
            return visit

    def _give_up(self, visit: Visit) -> None:
        """Whoever asked to come in does not want to any more; it may have been let in meanwhile."""
        visit.turn.cancel()
        self.leave(visit)

    def _let_in(self) -> None:
        while self._queue:
            visit = self._queue[0]
            busy = any(visit.alone or other.alone for other in self._inside)
            if busy and not visit.turn.cancelled():
                return
            self._queue.popleft()
            if visit.turn.set_running_or_notify_cancel():
                self._inside.add(visit)
                visit.turn.set_result(None)


async def to_the_end(work: Awaitable[Any]) -> Any:
    """Await what must not be left half done: whoever cancels this waits until it has ended."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break  # of the work: given below
    if cancelled is not None and not task.cancelled():
        if (failure := task.exception()) is not None:
            logger.error("It was cancelled, and has failed: %s", failure)  # whoever waited hears of the first only
        raise cancelled
    return task.result()


def _around() -> Iterator[Visit]:
    """The operations that the caller is a part of, innermost first. Tasks inherit them, and may outlive them."""
    visit = _current.get()
    while visit is not None:
        if not visit.over:
            yield visit
        visit = visit.around
