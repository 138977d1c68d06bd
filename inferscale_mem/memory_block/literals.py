"""Find JSON and Python literals in a text, as far as to see where one with quoted handles in it starts and ends."""

from __future__ import annotations

import re
from bisect import bisect_right

from inferscale_mem.memory_block.ranges import Range, Spans

MAX_UNCLOSED = 100
"""Brackets without an end after which no further literals are looked for: bounds the work on odd texts."""

MAX_DEPTH = 32
"""Brackets within brackets beyond which it is no literal."""

_BRACKET = re.compile(r"[\[{]")
_LITERAL_TOKEN = re.compile(r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[\[\]{}"']""")


def literals_around(text: str, spans: Spans) -> list[Range]:
    """The outermost ``[…]`` and ``{…}`` with quoted spans in them."""
    quoted = sorted(start for start, _ in spans if text[start - 1 : start] in ('"', "'"))
    found: list[Range] = []
    unclosed = at = 0
    while quoted and unclosed < MAX_UNCLOSED and (bracket := _BRACKET.search(text, at, quoted[-1])):
        end = _closing(text, bracket.start())
        if end is None:
            unclosed += 1
        elif quoted[bisect_right(quoted, bracket.start())] < end:
            found.append(Range(bracket.start(), end))
        at = end or bracket.end()
    return found


def _closing(text: str, start: int) -> int | None:
    """Where the literal that starts with the bracket at ``start`` ends; None if it does not."""
    open_brackets: list[str] = []
    for token in _LITERAL_TOKEN.finditer(text, start):
        mark = token.group()
        if mark in "[{" and len(open_brackets) == MAX_DEPTH:
            return None
        if mark in "[{":
            open_brackets.append({"[": "]", "{": "}"}[mark])
        elif mark in "]}":
            if open_brackets.pop() != mark:
                return None
            if not open_brackets:
                return token.end()
        elif len(mark) == 1:
            return None
    return None
