"""The rows of one Qdrant collection in memory: what makes search independent of how much other owners have stored."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any
from uuid import UUID

from qdrant_client.models import Record, ScoredPoint, SparseVector

from inferscale_mem.adapters.mem0.filters import Owner, Wanted, owners_of
from inferscale_mem.adapters.mem0.keywords import KeywordTable, Sparse
from inferscale_mem.adapters.mem0.vectors import VectorTable

RowId = int | str | UUID
_UNCHANGING = frozenset({str, int, float, bool, type(None)})


class ResidentRows:
    """Payloads, embeddings and keywords by row id. Not thread-safe: whoever has it holds a lock.

    Args:
        device: where the embeddings lie; see ``VectorTable``.
        keywords: name of the sparse vectors.
    """

    def __init__(self, device: str | None = None, keywords: str = "bm25") -> None:
        self._payloads: dict[RowId, dict[str, Any]] = {}
        self._owned: dict[Owner, dict[RowId, None]] = {}
        self._vectors: VectorTable[RowId] = VectorTable(device)
        self._keywords: KeywordTable[RowId] = KeywordTable()
        self._slot = keywords

    def __len__(self) -> int:
        return len(self._payloads)

    def put(self, row: Record) -> None:
        """A row as Qdrant has it now, with its vectors; it is kept, not copied."""
        self.remove(row.id)
        self._payloads[row.id] = payload = row.payload or {}
        for owner in owners_of(payload):
            self._owned.setdefault(owner, {})[row.id] = None
        dense, sparse = parts(row.vector, self._slot)
        if dense is not None:
            self._vectors.set(row.id, dense)
        if sparse is not None:
            self._keywords.set(row.id, sparse)

    def remove(self, row_id: RowId) -> None:
        """Forget a row; nothing if there is none."""
        for owner in set(owners_of(self._payloads.pop(row_id, {}))):
            del self._owned[owner][row_id]
            if not self._owned[owner]:
                del self._owned[owner]
        self._vectors.remove(row_id)
        self._keywords.remove(row_id)

    def nearest(self, vector: Sequence[float], wanted: Wanted, limit: int) -> list[ScoredPoint]:
        """Rows most similar to a vector by cosine."""
        return self._first(self._vectors.ranked(vector, self._candidates(wanted)), wanted, limit)

    def with_keywords(self, query: Sparse, wanted: Wanted, limit: int) -> list[ScoredPoint]:
        """Rows that match a sparse vector best."""
        return self._first(self._keywords.ranked(query, self._candidates(wanted)), wanted, limit)

    def listed(self, wanted: Wanted, limit: int) -> tuple[list[Record], RowId | None]:
        """Rows in the order of their ids, and the id of the next one."""
        among = self._candidates(wanted)
        order = sorted(self._payloads if among is None else among, key=_by_kind)
        limit = min(limit, len(order))
        page = list(islice((at for at in order if wanted.admits(at, self._payloads[at])), limit + 1))
        rows = [Record(id=at, payload=_copied(self._payloads[at])) for at in page[:limit]]
        return rows, page[limit] if len(page) > limit else None

    def every(self) -> Iterator[tuple[RowId, dict[str, Any], Sequence[float] | None]]:
        """All rows: (id, payload, embedding)."""
        for row_id, payload in self._payloads.items():
            vector = self._vectors.get(row_id).tolist() if row_id in self._vectors else None
            yield row_id, _copied(payload), vector

    def _candidates(self, wanted: Wanted) -> Set[RowId] | None:
        """Rows that have the owners; None for all."""
        if not wanted.owners:
            return None
        sets = sorted((self._owned.get(owner, {}) for owner in wanted.owners), key=len)
        found: Set[RowId] = sets[0].keys()
        for other in sets[1:]:
            found = found & other.keys()
        return found

    def _first(self, ranked: Iterable[tuple[RowId, float]], wanted: Wanted, limit: int) -> list[ScoredPoint]:
        admitted = ((at, score) for at, score in ranked if wanted.admits(at, self._payloads[at]))
        # Copied: Mem0 changes the payloads that it is given.
        return [
            ScoredPoint.model_construct(id=at, version=0, score=score, payload=_copied(self._payloads[at]))
            for at, score in islice(admitted, min(limit, len(self._payloads)))
        ]


def _copied(value: Any) -> Any:
    """As ``copy.deepcopy``, and several times as fast for what payloads hold; a search copies four times its hits."""
    if type(value) is dict:
        return {name: inner if type(inner) in _UNCHANGING else _copied(inner) for name, inner in value.items()}
    return copy.deepcopy(value)


def parts(vector: Any, slot: str = "bm25") -> tuple[Sequence[float] | None, Sparse | None]:
    """The embedding and the keywords of a row's vectors; the embedding has no name."""
    if not isinstance(vector, dict):
        return vector, None
    sparse = vector.get(slot)
    return vector.get(""), weights(sparse) if isinstance(sparse, SparseVector) else None


def weights(sparse: SparseVector) -> Sparse:
    """A sparse vector as weight by index."""
    return dict(zip(sparse.indices, sparse.values, strict=True))


def _by_kind(row_id: RowId) -> tuple[str, int]:
    """Qdrant's order: numbers, then UUIDs."""
    return ("", row_id) if isinstance(row_id, int) else (str(row_id), 0)
