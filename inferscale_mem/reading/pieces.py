"""What an answer is made of, as it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Said to the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Thought aloud before the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A piece of a tool call.

    Attributes:
        index: which call of the answer, from 0.
        name: of the tool; on a call's first piece only, "" if the model gave none.
        arguments: the next characters of the arguments, as the model wrote them; together they should be a JSON object.
    """

    index: int
    name: str | None
    arguments: str


Piece = Text | Reasoning | Call
