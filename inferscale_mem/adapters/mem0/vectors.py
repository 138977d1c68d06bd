"""Embeddings in one matrix, for exact search: on the host, or on a device that torch knows."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=Hashable)
Floats = NDArray[np.float32]


class VectorTable(Generic[Key]):
    """Unit vectors by key, float32; grows by doubling, and a removed row is filled with the last one.

    Args:
        device: where the matrix lies: a torch device such as "cuda", or None: in host memory, without torch.
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._keys: list[Key] = []
        self._row: dict[Key, int] = {}
        self._data: Any = self._zeros(0, 0)

    def __contains__(self, key: Key) -> bool:
        return key in self._row

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, key: Key, vector: Sequence[float]) -> None:
        """Add or replace a vector; all of one table have the same length."""
        row = _unit(vector)
        at = self._row.get(key)
        if at is None:
            at = len(self._keys)
            if at == len(self._data):
                grown = self._zeros(max(16, 2 * at), len(row))
                if at:
                    grown[:at] = self._data
                self._data = grown
            self._keys.append(key)
            self._row[key] = at
        self._data[at] = self._placed(row)

    def get(self, key: Key) -> Floats:
        """A vector, of length 1; KeyError if there is none."""
        return self._host(self._data[self._row[key]]).copy()

    def remove(self, key: Key) -> None:
        """Forget a vector; nothing if there is none."""
        at = self._row.pop(key, None)
        if at is None:
            return
        last = self._keys.pop()
        if last != key:
            self._keys[at] = last
            self._row[last] = at
            self._data[at] = self._data[len(self._keys)]

    def ranked(
        self, vector: Sequence[float] | Floats, among: Collection[Key] | None = None
    ) -> Iterator[tuple[Key, float]]:
        """Keys and their cosine similarity to the vector, most similar first; equal ones in the order of their rows.

        Args:
            among: only these keys (those of them that have a vector); None: all.
        """
        query, known = self._placed(_unit(vector)), self._data[: len(self._keys)]
        if not len(known):
            return
        if among is None:
            rows, scores = np.arange(len(self._keys)), self._host(known @ query)
        else:
            rows = np.sort(np.fromiter((self._row[key] for key in among if key in self._row), np.intp))
            # To gather rows costs more than to compute them: most of the table is computed as it lies.
            most = 2 * len(rows) > len(self._keys)
            scores = self._host(known @ query)[rows] if most else self._host(known[rows] @ query)
        for at in np.argsort(-scores, kind="stable"):
            yield self._keys[rows[at]], float(scores[at])

    def _zeros(self, rows: int, columns: int) -> Any:
        if self._device is None:
            return np.zeros((rows, columns), np.float32)
        import torch  # only for those who name a device

        return torch.zeros((rows, columns), dtype=torch.float32, device=self._device)

    def _placed(self, row: Floats) -> Any:
        if self._device is None:
            return row
        import torch

        return torch.from_numpy(row).to(self._device)

    def _host(self, values: Any) -> Floats:
        found: Floats = values if self._device is None else values.cpu().numpy()
        return found


def _unit(vector: Sequence[float] | Floats) -> Floats:
    row = np.asarray(vector, np.float32)
    unit: Floats = row / np.float32(max(float(np.linalg.norm(row)), 1e-12))
    return unit
