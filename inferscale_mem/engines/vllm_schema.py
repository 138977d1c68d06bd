"""JSON schemas as vLLM's guided decoding gets them: with spaces as models know them, and with ends to strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

STYLE = {"x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}}
"""Spaced as models have read most JSON: they choose worse values behind separators they do not know."""

CHARACTERS_PER_TOKEN = 2
"""Of text in strings: fewer than most tokens have, so that a bounded answer is over before its tokens are."""

LEAST = 8
_SPEAKING = ("enum", "const", "maxLength", "pattern", "format")


def guided(schema: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The schema to decode under.

    JSON that ``max_tokens`` cuts off is worth nothing, and weak models do not find the end of a string. So where the
    answer's length is bounded, each string that has no bound gets its share.
    """
    if max_tokens is None:
        return {**STYLE, **schema}
    strings = 0

    def count(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal strings
        strings += 1
        return part

    _each_string(schema, count)
    most = max(LEAST, CHARACTERS_PER_TOKEN * max_tokens // (strings + 1))
    bounded = _each_string(schema, lambda part: {**part, "maxLength": max(most, part.get("minLength", 0))})
    return {**STYLE, **bounded}


def _each_string(part: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with every unbounded string in it changed."""
    if isinstance(part, list):
        return [_each_string(inner, change) for inner in part]
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "string":
        return dict(part) if any(name in part for name in _SPEAKING) else change(dict(part))
    return {
        name: inner if name in ("enum", "const", "default", "examples", "required") else _each_string(inner, change)
        for name, inner in part.items()
    }
