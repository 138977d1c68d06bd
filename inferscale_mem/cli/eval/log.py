"""What an evaluation has found so far, line by line in a file, so that one that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inferscale_mem.errors import ConfigError

ANSWER, ENCODED, VERDICT = "answer", "encoded", "verdict"
"""Kinds of lines."""

KEYS = {
    ANSWER: ("conversation", "question", "policy", "text_tail", "k"),
    ENCODED: ("conversation", "policy"),
    VERDICT: ("conversation", "question", "policy", "text_tail", "k", "judge"),
}
"""What names a line of each kind."""

Line = dict[str, Any]
Key = tuple[Any, ...]


class Log:
    """Lines by kind and key, in memory and in a JSONL file. Thread-safe.

    Args:
        path: the file; None keeps nothing.
        made_with: what must be the same for lines to be comparable; written first.

    Raises:
        ConfigError: the file was written by an evaluation with other settings.
    """

    def __init__(self, path: Path | None, made_with: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, dict[Key, Line]] = {kind: {} for kind in KEYS}
        self._file = None
        if path is None:
            return
        known = _read(path)
        if known:
            _check(path, known[0], made_with)
        for line in known[1:]:
            self._keep(line)
        self._file = path.open("a", encoding="utf-8")
        if known:
            self._file.write("\n")  # behind a line that was cut off
        else:
            self._write({"made_with": dict(made_with)})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, kind: str, line: Mapping[str, Any]) -> None:
        """Keep a line; it replaces one of the same key."""
        whole = {"kind": kind, **line}
        with self._lock:
            self._keep(whole)
            self._write(whole)

    def has(self, kind: str, *key: Any) -> bool:
        """Whether there is a line of this key."""
        with self._lock:
            return key in self._lines[kind]

    def lines(self, kind: str) -> list[Line]:
        """All lines of a kind."""
        with self._lock:
            return list(self._lines[kind].values())

    def _keep(self, line: Line) -> None:
        self._lines[line["kind"]][tuple(line[name] for name in KEYS[line["kind"]])] = line

    def _write(self, line: Line) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()


def _read(path: Path) -> list[Line]:
    """The lines that can be read: the last one may be cut off."""
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return lines


def _check(path: Path, first: Line, made_with: Mapping[str, Any]) -> None:
    before = first.get("made_with") or {}
    changed = [name for name in {**before, **made_with} if before.get(name) != made_with.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{path} was written with {name}={before.get(name)!r}, this evaluation has {made_with.get(name)!r}; give "
            "another --json, or remove that file to begin anew."
        )
