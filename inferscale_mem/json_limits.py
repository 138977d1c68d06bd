"""What JSON of a stranger may hold before anything walks through it, or hands it to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from inferscale_mem.errors import InputError

DEEPEST = 100
"""Lists and objects in each other that a request may have: whatever walks through it calls itself at each."""

LONG = 1 << 63
"""Whole numbers are from -LONG to LONG - 1."""


def check_depth(value: Any, name: str) -> None:
    """Raise InputError if this is nested deeper than DEEPEST levels; ``name`` says what it is."""
    for _ in _levels(value, name):
        pass


def check_json(value: Any, name: str) -> None:
    """Refuse what cannot travel to an engine as JSON.

    Raises:
        InputError: nested too deeply, half a surrogate pair, or a number that is too large.
    """
    for level in _levels(value, name):
        for one in level:
            if isinstance(one, str) and any("\ud800" <= char <= "\udfff" for char in one):
                raise InputError(f"{name} holds half a surrogate pair, which is no character.")
            if isinstance(one, int | float) and not -LONG <= one < LONG:
                raise InputError(f"{name} holds {str(one)[:40]}, which is no number of 64 bits.")


def _levels(value: Any, name: str) -> Iterator[list[Any]]:
    """What stands in lists and objects, level by level, names included."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise InputError(f"{name} is nested deeper than {DEEPEST} levels.")
        yield level
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                inner += one
        level, depth = inner, depth + 1
