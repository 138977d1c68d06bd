"""Keyword search over sparse vectors, by an inverted index: Qdrant's scores, for the rows that match at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)
Sparse = Mapping[int, float]
"""Weight by index of the term."""


class KeywordTable(Generic[Key]):
    """Sparse vectors by key, scored as Qdrant scores a sparse slot with the IDF modifier."""

    def __init__(self) -> None:
        self._vectors: dict[Key, Sparse] = {}
        self._postings: dict[int, dict[Key, float]] = {}

    def set(self, key: Key, vector: Sparse) -> None:
        """Add or replace a vector."""
        self.remove(key)
        self._vectors[key] = vector
        for term, weight in vector.items():
            self._postings.setdefault(term, {})[key] = weight

    def remove(self, key: Key) -> None:
        """Forget a vector; nothing if there is none."""
        for term in self._vectors.pop(key, {}):
            del self._postings[term][key]
            if not self._postings[term]:
                del self._postings[term]

    def ranked(self, query: Sparse, among: Collection[Key] | None = None) -> list[tuple[Key, float]]:
        """Keys that share a term with the query, and their scores, best first.

        Args:
            among: only these keys; None: all. How rare a term is depends on all of them in any case.
        """
        total: dict[Key, float] = {}
        for term in sorted(query):
            found = self._postings.get(term, {})
            weight = query[term] * self._idf(len(found))
            for key in found if among is None else found.keys() & among:
                total[key] = total.get(key, 0.0) + weight * found[key]
        scored = ((key, float(np.float32(score))) for key, score in total.items())
        return sorted(scored, key=lambda pair: -pair[1])

    def _idf(self, having: int) -> float:
        return math.log((len(self._vectors) - having + 0.5) / (having + 0.5) + 1)
