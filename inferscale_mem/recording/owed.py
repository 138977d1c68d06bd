"""Drops that the engine still owes: facts were deleted while it could not be reached."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from inferscale_mem.private_files import make_private_file


class OwedDrops:
    """Handles whose records the engine may still hold, although their facts are gone. Thread-safe.

    Args:
        path: where they are kept for the next process, for engines that outlive this one; made when there is something
            to keep, and shared by all processes of the store. None: in this process alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._handles: dict[str, None] = {}
        if path is not None and path.exists():
            with self._file() as db:
                self._handles = dict.fromkeys(handle for (handle,) in db.execute("SELECT handle FROM owed"))

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._handles))

    def note(self, handles: Iterable[str]) -> None:
        """These are about to be dropped: should this process die meanwhile, the next one sees to it.

        Not flushed to the disk: it is there for a process that dies, not for a machine that does.
        """
        if self._path is not None:
            with self._lock, self._file(flushed=False) as db:
                db.executemany("INSERT OR IGNORE INTO owed VALUES (?)", [(handle,) for handle in handles])

    def add(self, handles: Iterable[str]) -> None:
        """These are to be dropped, some time."""
        with self._lock:
            new = [handle for handle in dict.fromkeys(handles) if handle not in self._handles]
            self._handles.update(dict.fromkeys(new))
            if new and self._path is not None:
                with self._file() as db:
                    db.executemany("INSERT OR IGNORE INTO owed VALUES (?)", [(handle,) for handle in new])

    def paid(self, handles: Iterable[str]) -> None:
        """These have been dropped."""
        with self._lock:
            done = list(handles)
            for handle in done:
                self._handles.pop(handle, None)
            if done and self._path is not None:
                with self._file(flushed=False) as db:
                    db.executemany("DELETE FROM owed WHERE handle = ?", [(handle,) for handle in done])

    @contextlib.contextmanager
    def _file(self, flushed: bool = True) -> Iterator[sqlite3.Connection]:
        """The file, for one transaction. It is opened each time: deletes are rare, and processes share it."""
        assert self._path is not None
        make_private_file(self._path)
        with contextlib.closing(sqlite3.connect(self._path)) as db, db:
            if not flushed:
                db.execute("PRAGMA synchronous=OFF")
            db.execute("CREATE TABLE IF NOT EXISTS owed (handle TEXT PRIMARY KEY)")
            yield db
