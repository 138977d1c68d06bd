"""The last turns of each conversation, for extraction and encoding policies that need dialog; and who was here last.

Mem0's own window is not enough: it keeps no messages of ``infer=False``, the oldest ten of a long ``add``, and is never
purged.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inferscale_mem.adapters.mem0.facts import age
from inferscale_mem.private_files import make_private_file
from inferscale_mem.types import OWNER_FIELDS, Fact, Scope

KEPT = 64
"""Turns kept per scope."""

OFTEN = 60.0
"""Seconds in which further uses of a scope are not written down."""


class TurnLog:
    """Turns by scope in a small SQLite file. Thread-safe.

    Args:
        path: the file; made if it does not exist, for its owner only.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        make_private_file(path)  # what SQLite puts beside it has the same mode
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        owners = ", ".join(f"{name} TEXT" for name in OWNER_FIELDS)
        self._db.execute(f"CREATE TABLE IF NOT EXISTS turns (seq INTEGER PRIMARY KEY, said REAL, text TEXT, {owners})")
        self._db.execute(f"CREATE INDEX IF NOT EXISTS turns_of ON turns ({', '.join(OWNER_FIELDS)}, seq)")
        self._db.execute("CREATE TABLE IF NOT EXISTS used (scope TEXT PRIMARY KEY, at REAL)")
        self._used: dict[str, float] = dict(self._db.execute("SELECT scope, at FROM used"))

    def say(self, scope: Scope, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append the spoken turns of a conversation; system and tool messages are not said by anyone."""
        now = datetime.now(UTC).timestamp()
        owners = [getattr(scope, name) for name in OWNER_FIELDS]
        rows = [(now, text, *owners) for text in _spoken(messages)]
        where, values = _exactly(scope)
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO turns (said, text, user_id, agent_id, run_id) VALUES (?,?,?,?,?)", rows)
            self._db.execute(
                f"DELETE FROM turns WHERE {where} AND seq <= "
                f"(SELECT seq FROM turns WHERE {where} ORDER BY seq DESC LIMIT 1 OFFSET {KEPT})",
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

    def earlier(self, scope: Scope, messages: Sequence[Mapping[str, Any]], w: int) -> list[dict[str, str]]:
        """Up to w turns of exactly this scope, oldest first, as messages; less ``messages``, which are being added."""
        where, values = _exactly(scope)
        new = _spoken(messages)
        with self._lock:
            query = f"SELECT text FROM turns WHERE {where} ORDER BY seq DESC LIMIT ?"
            rows = self._db.execute(query, [*values, w + len(new)]).fetchall()
        for text in new:
            if (text,) in rows:
                rows.remove((text,))
        pairs = [text.split(": ", 1) for (text,) in reversed(rows[:w])]
        return [{"role": role, "content": content} for role, content in pairs]

    def use(self, scope: Scope) -> None:
        """Somebody adds to a scope, or asks for it, now."""
        now = datetime.now(UTC).timestamp()
        with self._lock, self._db:
            if now - self._used.get(scope.key, 0.0) >= OFTEN:
                self._used[scope.key] = now
                self._db.execute("INSERT OR REPLACE INTO used VALUES (?, ?)", (scope.key, now))

    def last_used(self, scope: Scope) -> float:
        """When facts of exactly this scope could last have been asked for, in seconds since 1970; 0 if never."""
        wider = [{name: scope.owners[name] for name in names} for names in _subsets(tuple(scope.owners))]
        with self._lock:
            return max(self._used.get(Scope(**owners).key, 0.0) for owners in wider)

    def forget(self, scope: Scope | None) -> None:
        """Delete what was said in every scope that this one covers; everything if None."""
        owners = scope.owners if scope else {}
        where = " AND ".join(f"{name} = ?" for name in owners) or "1"
        with self._lock, self._db:
            self._db.execute(f"DELETE FROM turns WHERE {where}", list(owners.values()))
            gone = [key for key in self._used if scope is None or scope.covers(Scope(**json.loads(key)))]
            for key in gone:
                del self._used[key]
            self._db.executemany("DELETE FROM used WHERE scope = ?", [(key,) for key in gone])

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._db.close()


def _spoken(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{message['role']}: {message['content']}"
        for message in messages
        if message.get("role") in ("user", "assistant") and isinstance(message.get("content"), str)
    ]


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        yield from itertools.combinations(names, size)


def _exactly(scope: Scope) -> tuple[str, list[str | None]]:
    return " AND ".join(f"{name} IS ?" for name in OWNER_FIELDS), [getattr(scope, name) for name in OWNER_FIELDS]
