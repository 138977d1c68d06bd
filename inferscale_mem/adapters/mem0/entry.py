"""The way into a memory, and out of it, that each public operation takes."""

from __future__ import annotations

from inferscale_mem.adapters.mem0.core import Core
from inferscale_mem.adapters.mem0.gate import Visit
from inferscale_mem.errors import InferScaleError, StoreError


class Entry:
    """One public operation of a memory: ``with`` and ``async with`` give its core.

    Args:
        core: None of a memory that is plain Mem0.
        alone: whether nothing else may be under way meanwhile.

    Raises:
        StoreError: the memory is closed, or is being closed before the operation has come to its end.
    """

    def __init__(self, core: Core | None, *, alone: bool = False) -> None:
        self._core = core
        self._alone = alone
        self._visit: Visit | None = None

    def __enter__(self) -> Core | None:
        if self._core is not None:
            self._core.check_open()
            self._visit = self._core.gate.enter(alone=self._alone)
        return self._core

    async def __aenter__(self) -> Core | None:
        if self._core is not None:
            self._core.check_open()
            self._visit = await self._core.gate.enter_async(alone=self._alone)
        return self._core

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._core is None or self._visit is None:
            return
        self._core.gate.leave(self._visit)
        if self._core.taken_apart and isinstance(error, Exception) and not isinstance(error, InferScaleError):
            raise StoreError(
                "The memory was closed while this was under way; what it has not stored by now is not stored. Open a "
                "new one."
            ) from error

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)
