"""The server's table of announced facts: what handles stand for, and which of them have a record."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inferscale_mem import wire
from inferscale_mem.errors import HandleError
from inferscale_mem.handles import UNKNOWN, refusal, split, verify_tag
from inferscale_mem.kv.directory import ABSENT, CHANGED
from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.types import Fact

logger = logging.getLogger(__name__)

MOST = 200_000
"""Facts remembered; those announced longest ago go first, and are announced again when a search finds them."""


@dataclass(frozen=True)
class Known:
    """A fact, as its memory announced it under its lasting handle."""

    handle: str
    fact: Fact
    store: str
    fingerprint: str
    text_tail: int
    free_tokens: int = 0


class FactTable:
    """Handles of facts and of records. For one event loop; ``get`` and ``is_ready`` from any thread.

    Args:
        key: what handles must be signed with.
        most: facts remembered.
        clock: the time in Unix seconds: handles may expire.
    """

    def __init__(self, key: bytes, most: int = MOST, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._most = most
        self._clock = clock
        self._facts: OrderedDict[str, Known] = OrderedDict()  # by lasting handle
        self._named: dict[str, frozenset[str]] = {}  # id -> lasting handles with it: one for each store with the fact
        self._strict: dict[str, bool] = {}  # store -> whether the memory that announced last takes expiring ones only
        self._gone: OrderedDict[str, int] = OrderedDict()  # lasting handle -> moment of its drop
        self._moment = 0
        self._ready: set[str] = set()
        self._records: dict[str, set[str]] = {}  # handle -> those of its records that are ready

    def announce(self, said: Announcement) -> Announced:
        """Remember facts. Handles that are not genuine are left out.

        So are those of facts that were dropped as gone: an announcement may have been under way for longer than the
        drop was. It counts again if who announces knew of the drop, and found the fact there all the same.
        """
        self._strict[said.store] = said.strict
        missing, gone = [], []
        for handle, fact in said.facts.items():
            if not verify_tag(self._key, handle, said.store, fact.scope):
                logger.warning("A fact was announced with a handle that is not genuine; it is left out")
                continue
            if self._gone.get(handle, 0) > said.moment:
                gone.append(handle)
                continue
            self._gone.pop(handle, None)
            how = (said.store, said.fingerprint, said.text_tail, said.free_tokens)
            known = self._facts[handle] = Known(handle, fact, *how)
            self._facts.move_to_end(handle)
            name, _ = split(handle)
            self._named[name] = self._named.get(name, frozenset()) | {handle}
            if not self.is_ready(_record(handle, known.fingerprint)):
                missing.append(handle)
        while len(self._facts) > self._most:
            self._take(next(iter(self._facts)))
        return Announced(tuple(missing), tuple(gone), self._moment)

    def get(self, handle: str) -> Known | str:
        """What a handle that somebody shows stands for, or why it stands for nothing."""
        try:
            name, _ = split(handle)
        except HandleError:
            return UNKNOWN
        now, reason = self._clock(), UNKNOWN
        for lasting in self._named.get(name, ()):
            known = self._facts.get(lasting)
            if known is None:  # gone since
                continue
            strict = self._strict[known.store]
            why = refusal(self._key, handle, known.store, known.fact.scope, now=now, strict=strict)
            if why is None:
                return known
            reason = why if why != UNKNOWN else reason
        return reason

    def is_ready(self, record: str) -> bool:
        """Whether the record was made here, and nothing is known to have happened to it since."""
        return record in self._ready

    def note(self, params: Mapping[str, Any], answer: Mapping[str, Any] | None) -> None:
        """Learn from an order that the connector has obeyed, so it came from a holder of the key."""
        order = params.get(wire.KEY)
        if answer is None or "error" in answer or not isinstance(order, Mapping):
            return
        alive = set(order.get("alive") or ())
        for handle in order.get("handles") or ():
            if handle in alive:
                self.lost([handle])
            else:
                self._forget(handle)
        kept = set(answer.get("encoded", ()))
        for span in order.get("spans") or ():
            if span["record"] in kept and span.get("handle"):
                self._ready.add(span["record"])
                self._records.setdefault(span["handle"], set()).add(span["record"])
        self.lost(handle for handle, reason in answer.get("missed", ()) if reason in (ABSENT, CHANGED))

    def lost(self, handles: Iterable[str]) -> None:
        """The engine has no records of these any more."""
        for handle in handles:
            self._ready -= self._records.pop(handle, set())

    def _forget(self, handle: str) -> None:
        self._take(handle)
        self.lost([handle])
        # Goes up over restarts, too: what was said to a server that is no more must not count against a later drop.
        self._moment = self._gone[handle] = max(self._moment + 1, time.time_ns())
        self._gone.move_to_end(handle)
        if len(self._gone) > self._most:
            self._gone.popitem(last=False)

    def _take(self, handle: str) -> None:
        if self._facts.pop(handle, None) is None:
            return
        name, _ = split(handle)
        self._named[name] -= {handle}
        if not self._named[name]:
            del self._named[name]


def _record(handle: str, fingerprint: str) -> str:
    return f"{split(handle)[0]}.{fingerprint}"
