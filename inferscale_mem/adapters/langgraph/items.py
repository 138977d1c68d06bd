"""A store's items as facts: a fact's metadata hold namespace, key and value; its text is what the model reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import Item, SearchItem, get_text_at_path, tokenize_path

from inferscale_mem.errors import InputError
from inferscale_mem.types import Fact

Namespace = tuple[str, ...]

NAMESPACE, KEY, VALUE, CREATED, TTL, EXPIRES, INDEXED = (
    f"store_{name}" for name in ("namespace", "key", "value", "created_at", "ttl", "expires_at", "indexed")
)
TEXT_FIELDS = ("content", "text", "memory", "data")
"""Fields whose text speaks for itself, if nothing else is in a value."""


class MemoryItem(SearchItem):
    """A hit, with the handle that stands for it in a prompt."""

    __slots__ = ("handle",)

    def __init__(self, *, handle: str, **rest: Any) -> None:
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

    def item(self) -> Item:
        """As ``get`` gives it."""
        return Item(
            value=self.value,
            key=self.key,
            namespace=self.namespace,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )

    def hit(self, handle: str, score: float | None) -> MemoryItem:
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
    """The item in a fact; None if it is no store's."""
    told = fact.metadata
    if NAMESPACE not in told:
        return None
    ttl, expires = told.get(TTL), told.get(EXPIRES)
    return Row(
        fact=fact,
        namespace=tuple(json.loads(told[NAMESPACE])),
        key=str(told[KEY]),
        value=json.loads(told[VALUE]),
        created_at=datetime.fromisoformat(told[CREATED]),
        updated_at=datetime.fromisoformat(fact.created_at) if fact.created_at else datetime.now(UTC),
        ttl=float(ttl) if ttl is not None else None,
        expires_at=float(expires) if expires is not None else None,
        indexed=bool(told.get(INDEXED, True)),
    )


def metadata_of(
    namespace: Namespace, key: str, value: Mapping[str, Any], *, created_at: datetime, ttl: float | None, indexed: bool
) -> dict[str, Any]:
    """A fact's metadata for this item.

    Args:
        ttl: minutes.

    Raises:
        InputError: the value is not JSON.
    """
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"The value of {key!r} is not JSON ({error}); store what json.dumps can write.") from error
    told = {
        NAMESPACE: json.dumps(namespace),
        KEY: key,
        VALUE: written,
        CREATED: created_at.isoformat(),
        INDEXED: indexed,
    }
    return told if ttl is None else {**told, TTL: ttl, EXPIRES: time.time() + 60 * ttl}


def text_of(value: Mapping[str, Any], fields: Sequence[str] | None) -> str:
    """What the model reads of a value.

    The fields' text, a line each, if fields are named; else the text of a lone ``content`` (or the like), else
    ``name: value`` of everything.
    """
    if fields is not None and list(fields) != ["$"]:
        found = [text for field in fields for text in get_text_at_path(value, tokenize_path(field))]
        if found:
            return "; ".join(found)
    if len(value) == 1 and isinstance(only := next(iter(value.values())), str) and next(iter(value)) in TEXT_FIELDS:
        return only
    parts = (f"{name}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for name, v in value.items())
    return "; ".join(parts)
