"""A store's items as facts: a fact's metadata hold namespace, key and value; its text is what the model reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeGuard

from langgraph.store.base import Item, SearchItem, get_text_at_path, tokenize_path

from inferscale_mem.adapters.mem0.store_items import (
    CREATED,
    EXPIRES,
    INDEXED,
    KEPT_ONLY,
    KEY,
    NAMESPACE,
    TTL,
    VALUE,
    is_kept_only,
)
from inferscale_mem.errors import InputError
from inferscale_mem.types import Fact

Namespace = tuple[str, ...]

TEXT_FIELDS = ("content", "text", "memory", "data")
"""Fields whose text speaks for itself, if nothing else is in a value."""


class MemoryItem(SearchItem):
    """A hit, with the handle that stands for it in a prompt; None for an item that was put with ``index=False``."""

    __slots__ = ("handle",)

    def __init__(self, *, handle: str | None, **rest: Any) -> None:
        super().__init__(**rest)
        self.handle = handle

    def dict(self) -> dict[str, Any]:
        """As SearchItem's, with the handle."""
        return {**super().dict(), "handle": self.handle}


@dataclass(frozen=True)
class Row:
    """One stored item and the fact that holds it."""

    fact: Fact
    namespace: Namespace
    key: str
    value: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    ttl: float | None
    expires_at: float | None
    indexed: bool

    @property
    def expired(self) -> bool:
        """Whether its time has come."""
        return self.expires_at is not None and self.expires_at <= time.time()

    def names(self, namespace: Sequence[str], key: str) -> bool:
        """Whether it is the item of this namespace and key."""
        return self.key == key and self.namespace == tuple(namespace)

    def item(self) -> Item:
        """As ``get`` gives it."""
        return Item(
            value=self.value,
            key=self.key,
            namespace=self.namespace,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )

    @property
    def kept_only(self) -> bool:
        """Whether it was put with ``index=False``: its fact's text stands for nothing that is to be read."""
        return is_kept_only(self.fact.metadata)

    def hit(self, handle: str | None, score: float | None) -> MemoryItem:
        """As ``search`` gives it."""
        item = self.item()
        return MemoryItem(
            handle=handle,
            namespace=item.namespace,
            key=item.key,
            value=item.value,
            created_at=item.created_at,
            updated_at=item.updated_at,
            score=score,
        )


def row_of(fact: Fact) -> Row | None:
    """The item in a fact; None if it is no store's.

    Raises:
        ValueError: it is marked as an item, and cannot be read as one.
    """
    told = fact.metadata
    if NAMESPACE not in told:
        return None
    try:
        labels, value = json.loads(told[NAMESPACE]), json.loads(told[VALUE])
        row = Row(
            fact=fact,
            namespace=tuple(labels),
            key=told[KEY],
            value=value,
            created_at=datetime.fromisoformat(told[CREATED]),
            updated_at=datetime.fromisoformat(fact.created_at) if fact.created_at else datetime.now(UTC),
            ttl=told.get(TTL),
            expires_at=told.get(EXPIRES),
            indexed=told.get(INDEXED, True),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    times = (row.ttl, row.expires_at)
    if not (
        isinstance(labels, list)
        and isinstance(row.key, str)
        and isinstance(value, dict)
        and isinstance(row.indexed, bool)
        and (times == (None, None) or all(map(_is_time, times)))
    ):
        raise ValueError("a field of another type")
    return row


def metadata_of(
    namespace: Namespace,
    key: str,
    written: str,
    *,
    created_at: datetime,
    ttl: float | None,
    expires_at: float | None,
    indexed: bool,
    kept_only: bool,
) -> dict[str, Any]:
    """A fact's metadata for this item.

    Args:
        written: the value, as ``value_of`` writes it.
        ttl: minutes.
        expires_at: Unix seconds.
    """
    told = {
        NAMESPACE: json.dumps(namespace),
        KEY: key,
        VALUE: written,
        CREATED: created_at.isoformat(),
        INDEXED: indexed,
        **({KEPT_ONLY: True} if kept_only else {}),
    }
    return told if ttl is None else {**told, TTL: ttl, EXPIRES: expires_at}


def value_of(key: str, given: object) -> tuple[dict[str, Any], str]:
    """A value, and how it is written.

    Raises:
        InputError: it is no mapping with text keys, or not JSON.
    """
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        kind = "dict with keys that are no text" if isinstance(given, Mapping) else type(given).__name__
        raise InputError(f"The value of {key!r} is a {kind}; store a dict with text keys, e.g. {{'content': ...}}.")
    value = dict(given)
    try:
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"The value of {key!r} is not JSON ({error}); store what json.dumps can write.") from error


def check_fields(fields: object) -> list[str] | None:
    """Paths of a value's fields; InputError unless it is None, or a list or tuple of texts."""
    if fields is None:
        return None
    if not isinstance(fields, list | tuple) or not all(isinstance(field, str) for field in fields):
        raise InputError(f"{fields!r} names no fields of a value; give a list of paths, e.g. ['content'].")
    return list(fields)


def check_ttl(ttl: object) -> float | None:
    """Minutes to live; InputError unless it is None, or a number of them that has an end."""
    if ttl is None:
        return None
    if not _is_time(ttl) or ttl <= 0:
        raise InputError(f"ttl={ttl!r} is no time to live; give minutes, more than 0, or None: for ever.")
    return float(ttl)


def text_of(value: Mapping[str, Any], fields: Sequence[str] | None) -> str:
    """What the model reads of a value; "" if there is nothing.

    The text of the fields, if any are named (and of no others: what is not named may not be meant to be read); else the
    text of a lone ``content`` (or the like), else ``name: value`` of everything.
    """
    if fields is not None and "$" not in fields:
        paths = [path for field in fields if (path := tokenize_path(field))]  # no path at all stands for everything
        return "; ".join(text for path in paths for text in get_text_at_path(value, path))
    if len(value) == 1 and isinstance(only := next(iter(value.values())), str) and next(iter(value)) in TEXT_FIELDS:
        return only
    parts = (f"{name}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for name, v in value.items())
    return "; ".join(parts)


def _is_time(value: object) -> TypeGuard[float]:
    # Neither infinite nor NaN, and still a number when there are seconds made of it.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
