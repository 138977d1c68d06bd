"""Which fact's record has seen which other facts while it was encoded. Handles only."""

from __future__ import annotations

from collections.abc import Iterable


class Dependence:
    """A graph of handles: an edge from each record to the facts in its encode context. Callers lock.

    A record stays in the graph when the engine evicts it: what stands on it has still seen what it had seen.
    """

    def __init__(self) -> None:
        self._below: dict[str, set[str]] = {}
        self._above: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._below)

    def put(self, handle: str, context: Iterable[str]) -> None:
        """The record of ``handle`` was encoded behind the facts ``context``.

        An earlier context is replaced, unless other records stand on the earlier record: they have seen both.
        """
        kept = self._below.get(handle, set()) if self._above.get(handle) else set()
        self._unlink(handle)
        self._below[handle] = kept | set(context)
        for lower in self._below[handle]:
            self._above.setdefault(lower, set()).add(handle)

    def standing_on(self, handles: Iterable[str]) -> set[str]:
        """All handles whose records have seen one of these facts, directly or through another record; not these."""
        start = set(handles)
        seen = set(start)
        frontier = list(start)
        while frontier:
            fresh = self._above.get(frontier.pop(), set()) - seen
            seen |= fresh
            frontier += fresh
        return seen - start

    def forget(self, handles: Iterable[str]) -> None:
        """The records of these handles are gone, and so is everything that stood on them."""
        for handle in handles:
            self._unlink(handle)
            self._below.pop(handle, None)

    def _unlink(self, handle: str) -> None:
        for lower in self._below.get(handle, ()):
            higher = self._above[lower]
            higher.discard(handle)
            if not higher:
                del self._above[lower]
