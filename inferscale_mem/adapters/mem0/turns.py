"""The last turns of each conversation, for encoding policies that need dialog. Mem0's own window is not enough.

Mem0 keeps no messages of ``infer=False``, the oldest ten of a long ``add``, and never purges its window.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inferscale_mem.adapters.mem0.facts import age
from inferscale_mem.types import OWNER_FIELDS, Fact, Scope

KEPT = 64
"""Turns kept per scope."""


class TurnLog:
    """Turns by scope in a small SQLite file. Thread-safe.

    Args:
        path: the file; made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        owners = ", ".join(f"{name} TEXT" for name in OWNER_FIELDS)
        self._db.execute(f"CREATE TABLE IF NOT EXISTS turns (seq INTEGER PRIMARY KEY, said REAL, text TEXT, {owners})")

    def say(self, scope: Scope, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append the spoken turns of a conversation; system and tool messages are not said by anyone."""
        now = datetime.now(UTC).timestamp()
        owners = [getattr(scope, name) for name in OWNER_FIELDS]
        rows = [
            (now, f"{message['role']}: {message['content']}", *owners)
            for message in messages
            if message.get("role") in ("user", "assistant") and isinstance(message.get("content"), str)
        ]
        where, values = _exactly(scope)
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO turns (said, text, user_id, agent_id, run_id) VALUES (?,?,?,?,?)", rows)
            self._db.execute(
                f"DELETE FROM turns WHERE {where} AND seq NOT IN "
                f"(SELECT seq FROM turns WHERE {where} ORDER BY seq DESC LIMIT {KEPT})",
                [*values, *values],
            )

    def before(self, fact: Fact, w: int) -> list[str]:
        """Up to w turns of the fact's own scope, said before it was stored, oldest first."""
        where, values = _exactly(fact.scope)
        with self._lock:
            rows = self._db.execute(
                f"SELECT text FROM turns WHERE {where} AND said <= ? ORDER BY seq DESC LIMIT ?",
                [*values, age(fact)[0], w],
            ).fetchall()
        return [row[0] for row in reversed(rows)]

    def forget(self, scope: Scope | None) -> None:
        """Delete what was said in every scope that this one covers; everything if None."""
        owners = scope.owners if scope else {}
        where = " AND ".join(f"{name} = ?" for name in owners) or "1"
        with self._lock, self._db:
            self._db.execute(f"DELETE FROM turns WHERE {where}", list(owners.values()))

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._db.close()


def _exactly(scope: Scope) -> tuple[str, list[str | None]]:
    return " AND ".join(f"{name} IS ?" for name in OWNER_FIELDS), [getattr(scope, name) for name in OWNER_FIELDS]
