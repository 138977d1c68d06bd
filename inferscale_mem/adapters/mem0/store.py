"""Mem0's vector store with an eye on it: every write also reaches the index, and whoever keeps the records.

Mem0 writes from many places (two ``add`` pipelines, procedural memory, update, delete, reset, each of them twice, sync
and async), but all of them through this one object.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mem0.vector_stores.base import VectorStoreBase
from mem0.vector_stores.qdrant import Qdrant

from inferscale_mem.adapters.mem0.index import VectorIndex
from inferscale_mem.adapters.mem0.journal import Journal
from inferscale_mem.adapters.mem0.resident_qdrant import check_dims
from inferscale_mem.types import Fact

Changed = Callable[[Sequence[Fact], Sequence[Fact]], None]
"""(facts that are new, facts that are gone); a new revision is both."""

Going = Callable[[Sequence[str] | None], None]
"""(ids of the rows whose facts are about to go; None: of all)."""

STRIPES = 64


class FactStore(VectorStoreBase):  # type: ignore[misc]  # Mem0 ships no types
    """A Mem0 vector store, and an index that follows it.

    Args:
        inner: Mem0's store.
        index: told of every write, after it.
        changed: told of the facts that came and went.
        journal: told of each write before it, and of its history (by that) after it.
        part: around each write.
        going: told of the rows whose facts a write will end, before it.
    """

    def __init__(
        self,
        inner: Any,
        index: VectorIndex,
        changed: Changed,
        journal: Journal,
        part: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        going: Going = lambda rows: None,
    ) -> None:
        self.inner = inner
        self._part = part
        self._journal = journal
        self._index = index
        self._changed = changed
        self._going = going
        # Two writers of one row must reach store and index in the same order.
        self._stripes = [threading.Lock() for _ in range(STRIPES)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def insert(
        self,
        vectors: builtins.list[builtins.list[float]],
        payloads: builtins.list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
    ) -> Any:
        """Store rows, then report them.

        Raises:
            ConfigError: the vectors' length is not the store's; nothing was written.
        """
        check_dims(vectors, getattr(self.inner, "embedding_model_dims", None))
        self._index.load()
        # A delete of all may list a row the moment it is stored: it has to wait until the index knows the row.
        with self._part(), self._stripes_of(ids or []):
            self._journal.begin(map(str, ids or []))
            result = self.inner.insert(vectors=vectors, payloads=payloads, ids=ids)
            self._report(builtins.list(zip(map(str, ids or []), payloads or [], vectors, strict=False)))
        return result

    def update(self, vector_id: str, vector: list[float] | None = None, payload: dict[str, Any] | None = None) -> Any:
        """Change a row, then report its new revision.

        Raises:
            ConfigError: as ``insert``.
            ValueError: there is no such row (any more): Qdrant would make it again.
        """
        check_dims([vector] if vector is not None else [], getattr(self.inner, "embedding_model_dims", None))
        self._index.load()
        with self._part(), self._stripes_of([vector_id]):
            if self.inner.get(vector_id=vector_id) is None:
                raise ValueError(f"Memory with id {vector_id} not found; it was deleted meanwhile.")
            self._journal.begin([str(vector_id)])
            self._going([str(vector_id)])
            result = self.inner.update(vector_id=vector_id, vector=vector, payload=payload)
            if vector is None or payload is None:  # some stores merge what they are given into the row
                row = self.inner.get(vector_id=vector_id)
                payload = dict(getattr(row, "payload", None) or {})
            self._report([(str(vector_id), payload, vector)])
        return result

    def note(self, vector_id: str, metadata: Mapping[str, Any]) -> bool:
        """Set metadata that say nothing of the fact itself: its revision stays, and handle and record with it.

        Returns:
            Whether there is such a row.
        """
        self._index.load()
        with self._stripes_of([vector_id]):
            row = self.inner.get(vector_id=vector_id)
            if row is None:
                return False
            payload = {**(row.payload or {}), **metadata}
            # Qdrant merges: of a row that another process changes meanwhile nothing else is written over.
            self.inner.update(vector_id=vector_id, payload=metadata if isinstance(self.inner, Qdrant) else payload)
            self._index.put(str(vector_id), payload, None)
        return True

    def delete(self, vector_id: str) -> Any:
        """Delete a row, then report that it is gone."""
        self._index.load()
        with self._part(), self._stripes_of([vector_id]):
            self._journal.begin([str(vector_id)])
            self._going([str(vector_id)])
            result = self.inner.delete(vector_id=vector_id)
            gone = self._index.discard(str(vector_id))
            if gone is not None:
                self._changed([], [gone])
        return result

    def reset(self) -> Any:
        """Delete all rows, then report that they are gone."""
        return self._emptied(self.inner.reset)

    def delete_col(self) -> Any:
        """As ``reset``, and the collection with them."""
        return self._emptied(self.inner.delete_col)

    # Read, as they are.

    def create_col(self, *args: Any, **kwargs: Any) -> Any:
        """See Mem0."""
        return self.inner.create_col(*args, **kwargs)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """See Mem0."""
        return self.inner.search(*args, **kwargs)

    def search_batch(self, *args: Any, **kwargs: Any) -> Any:
        """See Mem0."""
        return self.inner.search_batch(*args, **kwargs)

    def keyword_search(self, *args: Any, **kwargs: Any) -> Any:
        """See Mem0."""
        return self.inner.keyword_search(*args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """See Mem0."""
        return self.inner.get(*args, **kwargs)

    def list(self, *args: Any, **kwargs: Any) -> Any:
        """See Mem0."""
        return self.inner.list(*args, **kwargs)

    def list_cols(self) -> Any:
        """See Mem0."""
        return self.inner.list_cols()

    def col_info(self) -> Any:
        """See Mem0."""
        return self.inner.col_info()

    def _emptied(self, empty: Callable[[], Any]) -> Any:
        self._index.load()
        with self._all_stripes():
            self._going(None)
            try:
                result = empty()
            except BaseException:  # some rows may be gone, or all
                self._changed([], self._index.reload())
                raise
            self._changed([], self._index.clear())
        return result

    def _stripes_of(self, rows: Iterable[object]) -> contextlib.ExitStack:
        return self._holding({hash(str(row)) % STRIPES for row in rows})

    def _all_stripes(self) -> contextlib.ExitStack:
        return self._holding(range(STRIPES))

    def _holding(self, stripes: Iterable[int]) -> contextlib.ExitStack:
        """These locks, taken in one order by everybody, until the block ends."""
        with contextlib.ExitStack() as held:
            for stripe in sorted(stripes):
                held.enter_context(self._stripes[stripe])
            return held.pop_all()

    def _report(self, rows: Sequence[tuple[str, Mapping[str, Any], Sequence[float] | None]]) -> None:
        changes = [self._index.put(*row) for row in rows]
        self._changed([new for new, _ in changes if new], [before for _, before in changes if before])
