"""What an evaluation has found so far, line by line in a file, so that one that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import portalocker

from inferscale_mem.errors import ConfigError

ANSWER, ENCODED, VERDICT, PLANTED = "answer", "encoded", "verdict", "planted"
"""Kinds of lines; the last: verdicts on planted wrong answers."""

KEYS = {
    ANSWER: ("conversation", "question", "policy", "text_tail", "k"),
    ENCODED: ("conversation", "policy"),
    VERDICT: ("conversation", "question", "policy", "text_tail", "k", "judge"),
    PLANTED: ("conversation", "question", "answer", "judge"),
}
"""What names a line of each kind."""

NUMBERS = {
    ANSWER: ("ll", "dll", "kl_mean", "kl_first", "top1", "category"),
    ENCODED: ("facts", "own_tokens", "tokens_prefilled", "ms"),
    VERDICT: (),
    PLANTED: (),
}
"""What lines of each kind are counted by."""

Line = dict[str, Any]
Key = tuple[Any, ...]


class Log:
    """Lines by kind and key, in memory and in a JSONL file. Thread-safe.

    Args:
        path: the file; None keeps nothing.
        made_with: what must be the same for lines to be comparable; written first.

    Raises:
        ConfigError: the file was written by an evaluation with other settings, or another one is writing it.
    """

    def __init__(self, path: Path | None, made_with: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, dict[Key, Line]] = {kind: {} for kind in KEYS}
        self._file: TextIO | None = None
        if path is None:
            return
        self._file = _locked(path)
        try:
            known = _read(path)
            # Several if logs were put together.
            headers = [line["made_with"] for line in known if isinstance(line.get("made_with"), dict)]
            for header in headers:
                _check(path, header, made_with)
            if known and not headers:
                raise ConfigError(f"{path} does not say what it was made with; give another --json, or remove it.")
            for line in known:
                if _is_whole(line):
                    self._keep(line)
        except BaseException:
            self._file.close()
            raise
        if path.stat().st_size:
            self._file.write("\n")  # behind a line that was cut off
        if not headers:
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
        return self.get(kind, *key) is not None

    def get(self, kind: str, *key: Any) -> Line | None:
        """The line of this key."""
        with self._lock:
            return self._lines[kind].get(key)

    def lines(self, kind: str) -> list[Line]:
        """All lines of a kind."""
        with self._lock:
            return list(self._lines[kind].values())

    def _keep(self, line: Line) -> None:
        self._lines[line["kind"]][tuple(line[name] for name in KEYS[line["kind"]])] = line

    def _write(self, line: Line) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _locked(path: Path) -> TextIO:
    """The file, open to be written behind its end by this process only."""
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --json.") from error
    try:
        portalocker.lock(file, portalocker.LOCK_EX | portalocker.LOCK_NB)
    except portalocker.LockException as error:
        file.close()
        raise ConfigError(f"Another evaluation is writing {path}; wait for it, or give another --json.") from error
    return file


def _read(path: Path) -> list[Line]:
    """The lines that can be read: one that was being written when all stopped may be cut off."""
    lines = []
    for text in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):  # of UTF-8, too
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def _is_whole(line: Line) -> bool:
    """Whether nothing is missing; what a damaged line was about is asked again."""
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in KEYS:
        return False
    named = all(isinstance(line.get(name), str | int) for name in KEYS[kind])
    return named and all(isinstance(line.get(name), int | float) for name in NUMBERS[kind])


def _check(path: Path, before: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
    changed = [name for name in {**before, **made_with} if before.get(name) != made_with.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{path} was written with {name}={before.get(name)!r}, this evaluation has {made_with.get(name)!r}; give "
            "another --json, or remove that file to begin anew."
        )
