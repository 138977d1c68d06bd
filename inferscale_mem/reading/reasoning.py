"""Reasoning apart from the answer: ``<think>…</think>``, or ``[THINK]…[/THINK]``, at an answer's start."""

from __future__ import annotations

from collections.abc import Iterator

from inferscale_mem.reading.held import split_at, starts
from inferscale_mem.reading.pieces import Piece, Reasoning, Text

MARKS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""How reasoning begins, and how it ends."""


def opened_by(prompt: str) -> str | None:
    """How the reasoning ends that a prompt has begun; None if it has not."""
    end = prompt[-64:].rstrip()
    return next((closing for opening, closing in MARKS.items() if end.endswith(opening)), None)


class ReasoningReader:
    """Tells reasoning from text.

    Args:
        closing: the prompt has begun reasoning that ends so.
    """

    def __init__(self, closing: str | None = None) -> None:
        self._held = ""
        self._closing = closing
        self._at_start = closing is None
        self._trim = closing is not None

    def add(self, text: str) -> Iterator[Piece]:
        """What the next characters are, as far as that can be told."""
        self._held += text
        if self._at_start and not self._begin():
            return
        if self._closing is not None:
            yield from self._reason(self._closing)
        if self._closing is None and not self._at_start and (said := self._trimmed()):
            yield Text(said)

    def finish(self) -> Iterator[Piece]:
        """What was held back."""
        held, self._held = self._held, ""
        if held:
            yield Text(held) if self._closing is None else Reasoning(held)

    def _begin(self) -> bool:
        """Whether it is clear if the answer starts with reasoning."""
        lead = self._held.lstrip()
        for opening, closing in MARKS.items():
            if lead.startswith(opening):
                self._held, self._closing, self._at_start, self._trim = lead[len(opening) :], closing, False, True
                return True
        if any(starts(opening, lead) for opening in MARKS):
            return False
        self._at_start = False
        return True

    def _reason(self, closing: str) -> Iterator[Piece]:
        if self._trim:  # the line break behind the mark
            self._held = self._held.lstrip("\n")
            self._trim = not self._held
        thought, self._held, found = split_at(self._held, closing)
        if found:
            self._closing, self._trim = None, True
        if thought:
            yield Reasoning(thought)

    def _trimmed(self) -> str:
        said, self._held = self._held, ""
        if self._trim:
            said = said.lstrip("\n")
            self._trim = not said
        return said
