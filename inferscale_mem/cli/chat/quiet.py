"""Keeps what other libraries and the engine's processes print out of the conversation, in a file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from inferscale_mem.errors import ConfigError


class Quiet:
    """Open as a context around the whole conversation.

    Inside, standard error goes to the file, and so do library logs and warnings; this package's own warnings, and what
    is written through ``sys.stderr``, still reach the person. The file stays open when the context ends: log handlers
    that libraries have made meanwhile go on writing to it.

    Args:
        log: written anew.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Quiet:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._log.open("w", buffering=1, encoding="utf-8", errors="replace")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The folder {self._log.parent} cannot be written ({error}); give another one with --home or "
                "INFERSCALE_HOME."
            ) from error
        self._stack.enter_context(contextlib.redirect_stderr(own_stream(sys.stderr, 2)))
        self._stack.enter_context(_pointed(2, self._file))
        _log_to(self._file)
        self._stack.enter_context(_captured_warnings())
        self._stack.enter_context(_own_messages())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around starting an engine: its processes, and logs set up meanwhile, print to the file for good."""
        with _pointed(1, self._file), contextlib.redirect_stdout(self._file):
            yield


class Stage(logging.Handler):
    """What this package last told the log, for whoever waits. Open as a context."""

    def __init__(self, first: str) -> None:
        super().__init__(logging.INFO)
        self._said = first

    def __enter__(self) -> Stage:
        logging.getLogger("inferscale_mem").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("inferscale_mem").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._said = record.getMessage().splitlines()[0]

    def __call__(self) -> str:
        """In brackets."""
        return f"({self._said[:1].lower()}{self._said[1:]})"


def own_stream(stream: TextIO, descriptor: int) -> TextIO:
    """The stream on a file descriptor of its own, so that redirecting ``descriptor`` does not touch it."""
    try:
        if stream.fileno() != descriptor:
            return stream
    except (OSError, ValueError):
        return stream  # no file behind it
    return open(os.dup(descriptor), "w", buffering=1, encoding=stream.encoding, errors="replace")


@contextlib.contextmanager
def _pointed(descriptor: int, target: TextIO) -> Iterator[None]:
    saved = os.dup(descriptor)
    os.dup2(target.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def _log_to(file: TextIO) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=file)


@contextlib.contextmanager
def _captured_warnings() -> Iterator[None]:
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)


@contextlib.contextmanager
def _own_messages() -> Iterator[None]:
    package, handler = logging.getLogger("inferscale_mem"), logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
