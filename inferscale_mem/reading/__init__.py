"""Read a model's answer as it comes: what is reasoning, what is text, what is a tool call.

``AnswerReader`` is told how the prompt has the answer begin, takes the engine's text, and gives pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inferscale_mem.reading.calls import CallReader
from inferscale_mem.reading.calls import Form as Form
from inferscale_mem.reading.pieces import Call as Call
from inferscale_mem.reading.pieces import Piece as Piece
from inferscale_mem.reading.pieces import Reasoning as Reasoning
from inferscale_mem.reading.pieces import Text as Text
from inferscale_mem.reading.reasoning import ReasoningReader
from inferscale_mem.reading.reasoning import opened_by as opened_by


@dataclass(frozen=True)
class Reading:
    """How to read an answer.

    Attributes:
        form: how its tool calls are written; None where there are no tools.
        call_of: the prompt has begun a call of this tool, and the answer is its arguments.
        in_call: the prompt has begun a call, and the answer is the call's object.
        key: how the arguments are called in that object.
        reasoning_end: how the reasoning ends that the prompt has begun.
    """

    form: Form | None = None
    call_of: str | None = None
    in_call: bool = False
    key: str = "arguments"
    reasoning_end: str | None = None


PLAIN = Reading()
"""Text, and reasoning if the model writes some."""


class AnswerReader:
    """Reads one answer."""

    def __init__(self, reading: Reading) -> None:
        self._call_of = reading.call_of
        self._named = False
        self._forced = reading.call_of is not None or reading.in_call
        self._reasoning = ReasoningReader(reading.reasoning_end)
        self._calls = CallReader(reading.form, inside=reading.in_call) if reading.form else None

    def add(self, text: str) -> Iterator[Piece]:
        """The pieces that these characters complete."""
        if self._call_of is not None:
            if text:
                yield Call(0, None if self._named else self._call_of, text)
                self._named = True
        elif self._forced:
            yield from self._in_calls([Text(text)])
        else:
            yield from self._in_calls(self._reasoning.add(text))

    def finish(self) -> Iterator[Piece]:
        """What was held back."""
        if self._call_of is not None:
            return
        if not self._forced:
            yield from self._in_calls(self._reasoning.finish())
        if self._calls is not None:
            yield from self._calls.finish()

    def _in_calls(self, pieces: Iterator[Piece] | list[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Text) and self._calls is not None:
                yield from self._calls.add(piece.text)
            else:
                yield piece
