"""One asyncio loop per engine, and both faces of the protocol over it, written once.

An engine implements ``_encode``, ``_generate``, ``_drop``, ``_status`` and ``_close`` as coroutines (an async generator
for ``_generate``); they all run on the engine's own loop, in a thread of its own. Callers may be plain threads or any
number of event loops, one after the other or at once.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from inferscale_mem.errors import EngineClosedError
from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.types import Chunk, EncodePlan, EncodeReport, EngineInfo, EngineStatus, PromptPlan, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise EngineClosedError("The engine is closed; open a new one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def on_this_thread(self) -> bool:
        """Whether the caller already runs on the loop's thread (where blocking on it would deadlock)."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel what still runs, stop the loop, join the thread."""
        if self._loop.is_closed():
            return

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(EngineClosedError):
            self.submit(cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class EngineBase(abc.ABC):
    """Sync and async faces of the engine protocol over coroutines on the engine's own loop."""

    def __init__(self, name: str) -> None:
        self._runner = LoopThread(name)
        self._closed = False
        self.dead = False
        """It failed beyond repair; whoever wants an engine has to open another."""
        self._close_lock = threading.Lock()

    # What an engine implements.

    @property
    @abc.abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    @abc.abstractmethod
    def tokenizer(self) -> ChatTokenizer: ...

    @abc.abstractmethod
    async def _encode(self, plan: EncodePlan) -> EncodeReport: ...

    @abc.abstractmethod
    def _generate(self, plan: PromptPlan, sampling: Sampling) -> AsyncGenerator[Chunk, None]: ...

    @abc.abstractmethod
    async def _drop(self, handles: Sequence[str], alive: Collection[str]) -> None: ...

    @abc.abstractmethod
    async def _status(self) -> EngineStatus: ...

    @abc.abstractmethod
    async def _close(self) -> None: ...

    # What callers use.

    def encode(self, plan: EncodePlan) -> EncodeReport:
        """See protocols.Engine."""
        return self._submit(self._encode(plan)).result()

    async def aencode(self, plan: EncodePlan) -> EncodeReport:
        """See protocols.Engine."""
        return await asyncio.wrap_future(self._submit(self._encode(plan)))

    def drop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        """See protocols.Engine."""
        self._submit(self._drop(handles, alive)).result()

    async def adrop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        """See protocols.Engine."""
        await asyncio.wrap_future(self._submit(self._drop(handles, alive)))

    def announce(self, announcement: Announcement) -> Announced:
        """See protocols.Engine; an engine of this process need not be told."""
        return Announced()

    def status(self) -> EngineStatus:
        """See protocols.Engine."""
        return self._submit(self._status()).result()

    def generate(self, plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        """See protocols.Engine."""
        source = self._generate(plan, sampling)
        try:
            while (chunk := self._submit(_next(source)).result()) is not None:
                yield chunk
        finally:
            if not self._closed:
                self._submit(_aclose(source)).result()

    async def agenerate(self, plan: PromptPlan, sampling: Sampling) -> AsyncIterator[Chunk]:
        """See protocols.Engine."""
        source = self._generate(plan, sampling)
        try:
            while (chunk := await asyncio.wrap_future(self._submit(_next(source)))) is not None:
                yield chunk
        finally:
            if not self._closed:
                self._submit(_aclose(source))

    def close(self) -> None:
        """See protocols.Engine."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._runner.submit(self._close()).result()
            finally:
                self._runner.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise EngineClosedError("The engine is closed; open a new one.")
        return self._runner.submit(self._until_closed(work))

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """Closing cancels what still runs; whoever waits for it is told why."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise EngineClosedError("The engine was closed while it worked on this; open a new one.") from None
            raise


async def _next(source: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(source, None)


async def _aclose(source: AsyncGenerator[Chunk, None]) -> None:
    # A cancelled caller can leave _next running for a moment; closing is only possible once it has stopped.
    for _ in range(1000):
        try:
            await source.aclose()
        except RuntimeError as error:
            last = error
            await asyncio.sleep(0.005)
        else:
            return
    logger.warning("a request that was given up could not be ended: %s", last)
