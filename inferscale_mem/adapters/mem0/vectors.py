"""Embeddings of one owner's facts, in one matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


class VectorTable:
    """Unit vectors by id; grows by doubling, and a removed row is filled with the last one."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._row: dict[str, int] = {}
        self._data: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def __contains__(self, key: str) -> bool:
        return key in self._row

    def __len__(self) -> int:
        return len(self._ids)

    def set(self, key: str, vector: Sequence[float]) -> None:
        """Add or replace a vector; all of one table have the same length."""
        row = np.asarray(vector, np.float32)
        row = row / max(float(np.linalg.norm(row)), 1e-12)
        at = self._row.get(key)
        if at is None:
            at = len(self._ids)
            if at == len(self._data):
                grown = np.zeros((max(16, 2 * at), len(row)), np.float32)
                if at:
                    grown[:at] = self._data
                self._data = grown
            self._ids.append(key)
            self._row[key] = at
        self._data[at] = row

    def get(self, key: str) -> NDArray[np.float32]:
        """A vector, of length 1; KeyError if there is none."""
        row: NDArray[np.float32] = self._data[self._row[key]].copy()
        return row

    def remove(self, key: str) -> None:
        """Forget a vector; nothing if there is none."""
        at = self._row.pop(key, None)
        if at is None:
            return
        last = self._ids.pop()
        if last != key:
            self._ids[at] = last
            self._row[last] = at
            self._data[at] = self._data[len(self._ids)]

    def ranked(self, vector: NDArray[np.float32]) -> Iterator[str]:
        """All ids, most similar to the vector first."""
        scores = self._data[: len(self._ids)] @ vector
        for at in np.argsort(-scores, kind="stable"):
            yield self._ids[at]
