"""What the chat prints, and how: plain lines; colours and a moving line only where a person looks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from inferscale_mem.cli.chat.session import Comparison

_DIM, _BOLD, _RESET = "\033[2m", "\033[1m", "\033[0m"
_TICK_S = 1.0
_PLAIN_TICK_S = 5.0


class Terminal:
    """Prints to a stream, in colour if it is a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._fancy = self._out.isatty()

    def line(self, text: str = "") -> None:
        """A line."""
        self.write(text + "\n")

    def note(self, text: str) -> None:
        """A line of secondary importance."""
        self.line(f"{_DIM}{text}{_RESET}" if self._fancy else text)

    def bold(self, text: str) -> str:
        """The text, bold in a terminal."""
        return f"{_BOLD}{text}{_RESET}" if self._fancy else text

    def write(self, text: str) -> None:
        """Text without a line break, shown at once."""
        self._out.write(text)
        self._out.flush()

    @contextlib.contextmanager
    def busy(self, label: str, state: Callable[[], str] = str) -> Iterator[None]:
        """Shows that work is going on, for how long, and how far it is (``state``), until the block ends."""
        done = threading.Event()
        started = time.monotonic()
        shower = threading.Thread(target=self._tick, args=(label, state, started, done), daemon=True)
        if not self._fancy:
            self.line(f"{label} …")
        shower.start()
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "stopped"
            raise
        finally:
            done.set()
            shower.join()
            clear = "\r\033[K" if self._fancy else ""
            self.line(f"{clear}{label}: {outcome} after {time.monotonic() - started:.1f} s")

    def _tick(self, label: str, state: Callable[[], str], started: float, done: threading.Event) -> None:
        while not done.wait(_TICK_S if self._fancy else _PLAIN_TICK_S):
            text = f"{label} … {time.monotonic() - started:.0f} s {state()}".rstrip()
            self.write(f"\r\033[K{text}" if self._fancy else f"{text}\n")


def describe(report: dict[str, Any]) -> str:
    """What happened to the memories of an answer, in one line."""
    facts = f"{report['facts_injected']} of {report['facts_requested']} facts injected"
    parts = [
        facts if report["facts_requested"] else "nothing to recall",
        f"{report['tokens_injected']} tokens injected, {report['tokens_prefilled']} prefilled",
    ]
    if report["ttft_ms"] is not None:
        parts.append(f"first token after {report['ttft_ms']:.0f} ms")
    reasons = sorted({miss["reason"] for miss in report["missed"]})
    if reasons:
        parts.append(f"{len(report['missed'])} missed ({'; '.join(reasons)})")
    return " · ".join(parts)


def describe_comparison(comparison: Comparison) -> str:
    """What plain text would have cost, in one line."""
    return (
        f"as plain text: {comparison.text_tokens} tokens prefilled, first token after {comparison.text_ms:.0f} ms, "
        f"{comparison.ratio:.1f} times as long"
        f"{'' if comparison.idle else ' (measured while facts were being encoded)'}"
    )
