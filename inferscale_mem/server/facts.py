"""The server's table of announced facts: what handles stand for, and which of them have a record."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inferscale_mem import wire
from inferscale_mem.handles import verify_tag
from inferscale_mem.kv.directory import ABSENT, CHANGED
from inferscale_mem.remote import Announcement
from inferscale_mem.types import Fact

logger = logging.getLogger(__name__)

MOST = 200_000
"""Facts remembered; those announced longest ago go first, and are announced again when a search finds them."""


@dataclass(frozen=True)
class Known:
    """A fact, as its memory announced it."""

    fact: Fact
    store: str
    fingerprint: str
    text_tail: int
    free_tokens: int = 0


class FactTable:
    """Handles of facts and of records. Not thread-safe: for one event loop.

    Args:
        key: what handles must be signed with.
        most: facts remembered.
    """

    def __init__(self, key: bytes, most: int = MOST) -> None:
        self._key = key
        self._most = most
        self._facts: OrderedDict[str, Known] = OrderedDict()
        self._ready: set[str] = set()
        self._records: dict[str, set[str]] = {}  # handle -> those of its records that are ready

    def announce(self, said: Announcement) -> list[str]:
        """Remember facts; returns the handles of those without a record. Handles that are not genuine are left out."""
        missing = []
        for handle, fact in said.facts.items():
            if not verify_tag(self._key, handle, said.store, fact.scope):
                logger.warning("A fact was announced with a handle that is not genuine; it is left out")
                continue
            known = self._facts[handle] = Known(fact, said.store, said.fingerprint, said.text_tail, said.free_tokens)
            self._facts.move_to_end(handle)
            if not self.is_ready(_record(handle, known.fingerprint)):
                missing.append(handle)
        while len(self._facts) > self._most:
            self._facts.popitem(last=False)
        return missing

    def get(self, handle: str) -> Known | None:
        """What was announced under this very handle."""
        return self._facts.get(handle)

    def is_ready(self, record: str) -> bool:
        """Whether the record was made here, and nothing is known to have happened to it since."""
        return record in self._ready

    def note(self, params: Mapping[str, Any], answer: Mapping[str, Any] | None) -> None:
        """Learn from an order that the connector has obeyed, so it came from a holder of the key."""
        order = params.get(wire.KEY)
        if answer is None or "error" in answer or not isinstance(order, Mapping):
            return
        for handle in order.get("handles") or ():
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
        self._facts.pop(handle, None)
        self.lost([handle])


def _record(handle: str, fingerprint: str) -> str:
    return f"{handle.split('.')[1]}.{fingerprint}"
