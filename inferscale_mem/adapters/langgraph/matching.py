"""Which items and namespaces an operation asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langgraph.store.base import MatchCondition

from inferscale_mem.adapters.langgraph.items import Namespace
from inferscale_mem.errors import InputError

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": lambda value, wanted: value == wanted,
    "$ne": lambda value, wanted: value != wanted,
    "$gt": lambda value, wanted: value > wanted,
    "$gte": lambda value, wanted: value >= wanted,
    "$lt": lambda value, wanted: value < wanted,
    "$lte": lambda value, wanted: value <= wanted,
}


def check_filter(wanted: object) -> None:
    """Raise InputError unless this is None, or a filter whose operators are known."""
    if wanted is None:
        return
    if not isinstance(wanted, Mapping):
        raise InputError(f"A filter is a dict of a value's fields, not {type(wanted).__name__}.")
    for asked in wanted.values():
        unknown = sorted(str(name) for name in asked if name not in _COMPARE) if _has_operators(asked) else []
        if unknown:
            raise InputError(f"Filter operator {unknown[0]!r} is not known; use {', '.join(_COMPARE)}.")


def fits(value: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> bool:
    """Whether a value has what a checked filter asks of its fields. What cannot be compared does not fit."""
    return all(_compares(value.get(name), asked) for name, asked in (wanted or {}).items())


def matches(namespace: Namespace, condition: MatchCondition) -> bool:
    """Whether a namespace begins, or ends, as the condition says; "*" is any label."""
    path = tuple(condition.path)
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(wanted in ("*", given) for wanted, given in zip(path, part, strict=True))


def _has_operators(asked: object) -> bool:
    return isinstance(asked, Mapping) and any(str(name).startswith("$") for name in asked)


def _compares(value: Any, asked: Any) -> bool:
    if not _has_operators(asked):
        return bool(value == asked)
    try:
        return all(bool(_COMPARE[name](value, operand)) for name, operand in asked.items())
    except TypeError:  # text against a number, or nothing at all
        return False
