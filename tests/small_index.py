"""A FactIndex in memory, for tests of what stands between index and engine."""

from __future__ import annotations

import math
import threading

from inferscale_mem.handles import HandleSigner
from inferscale_mem.types import Fact, Scope


class SmallIndex:
    """Facts in the order they were put in; similarity is the number of words in common."""

    def __init__(self, signer: HandleSigner) -> None:
        self._signer = signer
        self._facts: dict[str, Fact] = {}
        self.used: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def store(self) -> str:
        return self._signer.store

    def put(self, *facts: Fact) -> None:
        with self._lock:
            self._facts.update((fact.id, fact) for fact in facts)

    def take(self, *facts: Fact) -> None:
        with self._lock:
            for fact in facts:
                self._facts.pop(fact.id, None)

    def get(self, fact_id: str) -> Fact | None:
        with self._lock:
            return self._facts.get(fact_id)

    def by_handle_id(self, handle_id: str) -> Fact | None:
        return next((fact for fact in self.facts() if self._signer.handle_id(fact) == handle_id), None)

    def facts(self, scope: Scope | None = None) -> list[Fact]:
        with self._lock:
            return [fact for fact in self._facts.values() if scope is None or scope.covers(fact.scope)]

    def nearest(self, fact: Fact, m: int, below: float = math.inf) -> list[Fact]:
        words = set(fact.text.split())
        return sorted(self._older(fact), key=lambda other: -len(words & set(other.text.split())))[:m]

    def previous(self, fact: Fact, m: int) -> list[Fact]:
        return self._older(fact)[::-1][:m]

    def last_used(self, scope: Scope) -> float:
        return self.used.get(scope.key, 0.0)

    def turns(self, fact: Fact, w: int) -> list[str]:
        return []

    def _older(self, fact: Fact) -> list[Fact]:
        facts = [other for other in self.facts() if other.scope == fact.scope]
        ids = [other.id for other in facts]
        return facts[: ids.index(fact.id)] if fact.id in ids else facts
