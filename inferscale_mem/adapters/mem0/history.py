"""Mem0's history of facts, kept in step with the facts over crashes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Self

from mem0.memory.storage import SQLiteManager

from inferscale_mem.adapters.mem0.extraction import current
from inferscale_mem.adapters.mem0.journal import Journal
from inferscale_mem.adapters.mem0.turns import TurnLog
from inferscale_mem.errors import StoreError

logger = logging.getLogger(__name__)


class _Closed:
    """Stands where an open file was. False, as Mem0's None; and says what is wrong to whoever comes too late."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise StoreError("The history is closed: meanwhile the memory was closed, or reset.")


class History(SQLiteManager):  # type: ignore[misc]  # Mem0 ships no types
    """Mem0's history, which tells the journal what has been written, and its window of messages, which is ours."""

    journal: Journal
    turns: TurnLog

    @classmethod
    def over(cls, inner: SQLiteManager, journal: Journal, turns: TurnLog) -> Self:
        """The same open file; ``inner`` lets go of it."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(inner), journal=journal, turns=turns)
        # Reentrant: the garbage collector may close it in the middle of something.
        made._lock = threading.RLock()
        inner.connection = None
        return made

    def add_history(self, memory_id: str, *args: Any, **kwargs: Any) -> None:
        """See Mem0."""
        super().add_history(memory_id, *args, **kwargs)
        self.journal.done([str(memory_id)])

    def batch_add_history(self, records: list[dict[str, Any]]) -> None:
        """See Mem0."""
        super().batch_add_history(records)
        self.journal.done(str(record.get("memory_id")) for record in records)

    def get_last_messages(self, session_scope: str, limit: int = 10) -> list[dict[str, Any]]:
        """What was said before, as Mem0's pipeline asks for it: out of our own window, which ``add`` fills."""
        extraction = current()
        if extraction is None or extraction.scope is None:
            messages: list[dict[str, Any]] = super().get_last_messages(session_scope, limit)
            return messages
        return list(self.turns.earlier(extraction.scope, extraction.messages, limit))

    def save_messages(self, messages: list[dict[str, Any]], session_scope: str) -> None:
        """Nothing: Mem0's own window is never purged."""

    def close(self) -> None:
        """Let go of the file; what comes later ends in StoreError.

        Mem0's does not wait for others, and SQLite crashes if a connection is closed while it is used.
        """
        lock = vars(self).get("_lock")  # missing from one that was never made whole
        if lock is None:
            return
        with lock:
            super().close()
            self.connection = _Closed()


def repair(store: Any, history: SQLiteManager, rows: Iterable[str]) -> int:
    """Write the lines of history that a crash has kept from being written: what the store holds is what happened.

    Args:
        store: Mem0's vector store.
        history: of the same facts.
        rows: ids of rows that were being written.

    Returns:
        How many lines were missing.
    """
    written = 0
    for row_id in sorted(rows):
        row = store.get(vector_id=row_id)
        line = _missing(dict(getattr(row, "payload", None) or {}), history.get_history(row_id))
        if line is not None:
            history.add_history(row_id, **line)
            written += 1
    if written:
        logger.warning("%d facts were being written when a process died; their history is complete again.", written)
    return written


def _missing(payload: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The line that a row's history lacks, as ``add_history`` takes it; None if nothing is missing."""
    every = list(lines)
    gone = any(line["is_deleted"] for line in every)
    last = max(every, key=lambda line: str(line["updated_at"] or line["created_at"] or ""), default=None)
    if not payload.get("data"):
        if last is None or gone:
            return None
        return {
            **{name: last[name] for name in ("created_at", "actor_id", "role")},
            "old_memory": last["new_memory"],
            "new_memory": None,
            "event": "DELETE",
            "updated_at": datetime.now(UTC).isoformat(),
            "is_deleted": 1,
        }
    line = {name: payload.get(name) for name in ("created_at", "updated_at", "actor_id", "role")}
    if last is None:
        return {**line, "old_memory": None, "new_memory": payload["data"], "event": "ADD"}
    if (last["updated_at"] or last["created_at"]) == payload.get("updated_at"):
        return None
    return {**line, "old_memory": last["new_memory"], "new_memory": payload["data"], "event": "UPDATE"}
