"""Which rows are being written: after a crash, these are the ones whose history may be missing."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import portalocker

ALL = "*"
"""Stands for every row: a reset."""

LONG = 1 << 16
"""Bytes after which the file is written anew."""

SUFFIX = ".writing"


class Journal:
    """Intents, in a small file beside the history. Thread-safe.

    Mem0 writes a fact first, and its line of history afterwards. Here a row's id is noted before the first, and struck
    out after the second. The file is of this process alone, held by a lock that ends with it. Nothing is flushed to the
    disk: it is there for a process that dies, not for a machine that does; after that, too, the facts are all there,
    and only a line of history may be missing.

    Args:
        history: Mem0's history file; None where it is kept in memory.
    """

    def __init__(self, history: Path | None) -> None:
        self._history = history
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._size = 0
        self._file: int | None = None
        self._path: Path | None = None
        if history is not None:
            self._path = history.with_name(f"{history.name}.{secrets.token_hex(8)}{SUFFIX}")

    def begin(self, rows: Iterable[str]) -> None:
        """These are about to be written."""
        self._note("+", rows)

    def done(self, rows: Iterable[str]) -> None:
        """The history of these has been written."""
        self._note("-", rows)

    @contextlib.contextmanager
    def resetting(self) -> Iterator[None]:
        """Everything is being deleted. Who lives on sees how that ended; only after a crash it is to be finished."""
        self.begin([ALL])
        try:
            yield
        finally:
            self.done([ALL])

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[set[str]]:
        """Rows that processes were writing when they died; forgotten when the block ends well."""
        if self._history is None:
            yield set()
            return
        rows: set[str] = set()
        with contextlib.ExitStack() as held:
            left = []
            for path in sorted(self._history.parent.glob(f"{self._history.name}.*{SUFFIX}")):
                with contextlib.suppress(OSError, portalocker.LockException):  # of a process that lives
                    file = held.enter_context(open(path, encoding="utf-8", errors="replace"))
                    portalocker.lock(file, portalocker.LOCK_EX | portalocker.LOCK_NB)
                    rows |= _read(file.read())
                    left.append(path)
            yield rows
            for path in left:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file. It stays if something in it is not done: the next start will see to that."""
        with self._lock:
            if self._file is None or self._path is None:
                return
            os.close(self._file)
            self._file = None
            if not self._open:
                self._path.unlink(missing_ok=True)

    def leave_to_parent(self) -> None:
        """In a process that was forked: let go of the parent's file. The lock stays with the parent."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._path = None

    def _note(self, sign: str, rows: Iterable[str]) -> None:
        if self._path is None:
            return
        with self._lock:
            for row in rows:
                self._open[row] += 1 if sign == "+" else -1
                if self._open[row] <= 0:
                    del self._open[row]
                self._write(f"{sign}{row}\n")
            if self._size and (not self._open or self._size > LONG):
                os.ftruncate(self._made(), 0)
                self._size = 0
                self._write("".join(f"+{row}\n" for row in self._open.elements()))

    def _write(self, lines: str) -> None:
        self._size += os.write(self._made(), lines.encode())

    def _made(self) -> int:
        if self._file is None:
            assert self._path is not None
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            portalocker.lock(self._file, portalocker.LOCK_EX | portalocker.LOCK_NB)
        return self._file


def _read(lines: str) -> set[str]:
    """The rows that were begun and not done; a last line that was cut off counts for nothing."""
    counts: Counter[str] = Counter()
    for line in lines.splitlines(keepends=True):
        if line.endswith("\n") and line[0] in "+-":
            counts[line[1:-1]] += 1 if line[0] == "+" else -1
    return {row for row, count in counts.items() if count > 0}
