"""The durable facts of one Mem0 vector store, kept in memory too: what the recorder and the chat model look up."""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from inferscale_mem.adapters.mem0.facts import age, expired, expiry, fact_of
from inferscale_mem.adapters.mem0.listing import rows
from inferscale_mem.adapters.mem0.store_items import is_kept_only
from inferscale_mem.adapters.mem0.turns import TurnLog
from inferscale_mem.adapters.mem0.vectors import VectorTable
from inferscale_mem.types import Fact, Scope

logger = logging.getLogger(__name__)

Embed = Callable[[list[str]], Sequence[Sequence[float]]]


@dataclass
class _Entry:
    fact: Fact
    handle_id: str
    age: tuple[float, str]
    last_day: date | None

    @property
    def live(self) -> bool:
        return not expired(self.last_day)

    @property
    def telling(self) -> bool:
        """Whether it may be context of other facts."""
        return self.live and not is_kept_only(self.fact.metadata)


@dataclass
class _Group:
    """The facts of exactly one scope."""

    scope: Scope
    entries: dict[str, _Entry] = field(default_factory=dict)
    vectors: VectorTable[str] = field(default_factory=VectorTable)


class VectorIndex:
    """protocols.FactIndex over a Mem0 vector store.

    Everything is read from the store once, when first needed, and kept up to date by ``put``, ``discard`` and
    ``clear``, which whoever writes to the store calls after each write.

    Args:
        store: name of the store, as it goes into handles' tags.
        inner: the vector store (as a function: Mem0 replaces it on reset).
        handle_id: a fact's handle id.
        embed: embeddings of texts, for stores that do not give theirs back.
        turns: what was said around the facts; None knows nothing of that.
        exclusive: nobody else writes to the store. Otherwise a fact is read again from the store before it is used.
    """

    def __init__(
        self,
        store: str,
        inner: Callable[[], Any],
        handle_id: Callable[[Fact], str],
        embed: Embed,
        turns: TurnLog | None = None,
        *,
        exclusive: bool,
    ) -> None:
        self._store = store
        self._inner = inner
        self._handle_id = handle_id
        self._embed = embed
        self._turns = turns
        self._exclusive = exclusive
        self._lock = threading.RLock()
        self._loaded = False
        self._entries: dict[str, _Entry] = {}
        self._by_handle: dict[str, str] = {}
        self._groups: dict[str, _Group] = {}
        self._ends: dict[date, set[str]] = {}  # ids of facts by the last day of theirs, until that has been swept

    # protocols.FactIndex

    @property
    def store(self) -> str:
        """See protocols.FactIndex."""
        return self._store

    def get(self, fact_id: str) -> Fact | None:
        """See protocols.FactIndex."""
        self.load()
        if not self._exclusive:
            self._reread(fact_id)
        with self._lock:
            entry = self._entries.get(fact_id)
            return entry.fact if entry and entry.live else None

    def by_handle_id(self, handle_id: str) -> Fact | None:
        """See protocols.FactIndex."""
        self.load()
        with self._lock:
            fact_id = self._by_handle.get(handle_id)
        fact = self.get(fact_id) if fact_id is not None else None
        return fact if fact is not None and self._handle_id(fact) == handle_id else None

    def facts(self, scope: Scope | None = None) -> list[Fact]:
        """See protocols.FactIndex."""
        self.load()
        with self._lock:
            groups = [g for g in self._groups.values() if scope is None or scope.covers(g.scope)]
            entries = [entry for group in groups for entry in group.entries.values() if entry.live]
        return [entry.fact for entry in sorted(entries, key=lambda entry: entry.age)]

    def previous(self, fact: Fact, m: int) -> list[Fact]:
        """See protocols.FactIndex."""
        self.load()
        with self._lock:
            group = self._groups.get(fact.scope.key)
            older = [e for e in group.entries.values() if e.age < age(fact) and e.telling] if group else []
        return [entry.fact for entry in heapq.nlargest(m, older, key=lambda entry: entry.age)]

    def nearest(self, fact: Fact, m: int, below: float = math.inf) -> list[Fact]:
        """See protocols.FactIndex."""
        self.load()
        self._fill_vectors(fact)
        with self._lock:
            group = self._groups.get(fact.scope.key)
            if group is None:
                return []
            most, alike = max(m, len(group.entries) // 2), 0
            found: list[Fact] = []
            for entry, similarity in _older(group, fact):
                if similarity >= below and alike < most:
                    alike += 1
                elif len(found) < m:
                    found.append(entry.fact)
                else:
                    break
        return found

    def turns(self, fact: Fact, w: int) -> list[str]:
        """See protocols.FactIndex."""
        return self._turns.before(fact, w) if self._turns else []

    def last_used(self, scope: Scope) -> float:
        """See protocols.FactIndex."""
        return self._turns.last_used(scope) if self._turns else 0.0

    # Kept up to date by whoever writes to the store.

    def load(self) -> None:
        """Read the store, unless that has been done. Writers call it first: what was before can only be told then."""
        # Writers wait for the lock: a row written meanwhile is either in the scan or put afterwards, or both.
        if self._loaded:
            return
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            try:
                for fact_id, payload, vector in rows(self._inner()):
                    self.put(fact_id, payload, vector)
            except BaseException:
                self._loaded = False
                raise

    def put(
        self, fact_id: str, payload: Mapping[str, Any], vector: Sequence[float] | None
    ) -> tuple[Fact | None, Fact | None]:
        """A row was written: what it is now, and what it was before; None where that is no live fact."""
        self.load()
        with self._lock:
            known = self._vector_of(fact_id, payload) if vector is None else None
            before = self._forget(fact_id)
            fact = fact_of(fact_id, payload)
            if fact is None:
                return None, before
            entry = _Entry(fact, self._handle_id(fact), age(fact), expiry(payload))
            self._entries[fact_id] = entry
            self._by_handle[entry.handle_id] = fact_id
            group = self._groups.setdefault(fact.scope.key, _Group(fact.scope))
            group.entries[fact_id] = entry
            if (row := known if vector is None else vector) is not None:
                group.vectors.set(fact_id, row)
            if entry.last_day is not None:
                self._ends.setdefault(entry.last_day, set()).add(fact_id)
            same = before is not None and before.revision == fact.revision
            return (fact if entry.live else None), (None if same else before)

    def discard(self, fact_id: str) -> Fact | None:
        """A row was deleted: what it was."""
        self.load()
        with self._lock:
            return self._forget(fact_id)

    def clear(self) -> list[Fact]:
        """All rows were deleted: what they were."""
        self.load()
        with self._lock:
            gone = [entry.fact for entry in self._entries.values()]
            for known in (self._entries, self._by_handle, self._groups, self._ends):
                known.clear()
            return gone

    def reload(self) -> list[Fact]:
        """Nobody knows what became of the rows: what there was and is no more. Read later, if that fails now."""
        with self._lock:
            before = self.clear()
            self._loaded = False
            try:
                self.load()
            except Exception as error:
                logger.warning("The stored facts cannot be read now: %s", error)
                return []
            return [fact for fact in before if (now := self._entries.get(fact.id)) is None or now.fact != fact]

    def sweep(self) -> list[Fact]:
        """Facts that have expired since the last call."""
        with self._lock:
            over = [self._ends.pop(day) for day in sorted(day for day in self._ends if expired(day))]
            return [self._entries[fact_id].fact for ids in over for fact_id in ids]

    def learn(self, fact: Fact) -> None:
        """A fact was seen in a search result. In a shared store somebody else may have written it."""
        if self._exclusive:
            return
        self.load()
        with self._lock:
            known = self._entries.get(fact.id)
        if known is None or known.fact.revision != fact.revision:
            self._reread(fact.id)

    # Inside.

    def _vector_of(self, fact_id: str, payload: Mapping[str, Any]) -> Any:
        """The known embedding of a row whose text has not changed."""
        entry = self._entries.get(fact_id)
        if entry is None or entry.fact.text != payload.get("data"):
            return None
        vectors = self._groups[entry.fact.scope.key].vectors
        return vectors.get(fact_id) if fact_id in vectors else None

    def _forget(self, fact_id: str) -> Fact | None:
        entry = self._entries.pop(fact_id, None)
        if entry is None:
            return None
        self._by_handle.pop(entry.handle_id, None)
        if entry.last_day is not None:
            self._ends.get(entry.last_day, set()).discard(fact_id)
        group = self._groups[entry.fact.scope.key]
        group.entries.pop(fact_id, None)
        group.vectors.remove(fact_id)
        if not group.entries:
            del self._groups[entry.fact.scope.key]
        return entry.fact

    def _reread(self, fact_id: str) -> None:
        row = self._inner().get(vector_id=fact_id)
        payload = dict(getattr(row, "payload", None) or {})
        fact = fact_of(fact_id, payload)
        with self._lock:
            known = self._entries.get(fact_id)
            if fact is None:
                self._forget(fact_id)
            elif known is None or known.fact != fact:
                self.put(fact_id, payload, None)

    def _fill_vectors(self, fact: Fact) -> None:
        with self._lock:
            group = self._groups.get(fact.scope.key)
            if group is None:
                return
            lacking = [entry.fact for fact_id, entry in group.entries.items() if fact_id not in group.vectors]
        if not lacking:
            return
        vectors = self._embed([other.text for other in lacking])
        with self._lock:
            for other, vector in zip(lacking, vectors, strict=True):
                entry = self._entries.get(other.id)
                if entry is not None and entry.fact.revision == other.revision:
                    self._groups[other.scope.key].vectors.set(other.id, vector)


def _older(group: _Group, fact: Fact) -> Iterator[tuple[_Entry, float]]:
    """Context of a fact: older ones and their cosine similarity, most similar first; none without a vector."""
    if fact.id not in group.vectors:
        return
    limit = age(fact)
    for fact_id, similarity in group.vectors.ranked(group.vectors.get(fact.id)):
        entry = group.entries[fact_id]
        if entry.age < limit and entry.telling:
            yield entry, similarity
