"""Filters of Qdrant, taken apart: owners, which an index can look up, and the rest, which is asked of each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from qdrant_client.local.payload_filters import check_filter
from qdrant_client.models import FieldCondition, Filter, MatchValue

from inferscale_mem.types import OWNER_FIELDS

Owner = tuple[str, str]
"""(field, value), e.g. ("user_id", "alice")."""


@dataclass(frozen=True)
class Wanted:
    """What a filter wants.

    Attributes:
        owners: the row must have each of these.
        rest: everything else, decided by embedded Qdrant's own code, so that it means the same; None admits all.
    """

    owners: frozenset[Owner] = frozenset()
    rest: Filter | None = field(default=None, compare=False)

    @classmethod
    def of(cls, asked: Filter | None) -> Wanted:
        """The parts of a filter as Mem0's Qdrant class builds it."""
        if asked is None:
            return cls()
        must = asked.must if isinstance(asked.must, list) else [asked.must] if asked.must else []
        owners = (owner for condition in must if (owner := _owner(condition)) is not None)
        others = [condition for condition in must if _owner(condition) is None]
        rest = asked.model_copy(update={"must": others or None})
        asks = others or asked.should or asked.must_not or asked.min_should
        return cls(frozenset(owners), rest if asks else None)

    def admits(self, row_id: int | str | UUID, payload: dict[str, Any]) -> bool:
        """Whether a row that has the owners is wanted."""
        return self.rest is None or bool(check_filter(self.rest, payload, row_id, {}))


def owners_of(payload: dict[str, Any]) -> Iterator[Owner]:
    """Each owner that a filter can find this row by: a list is found by each of its items."""
    for name in OWNER_FIELDS:
        found = payload.get(name)
        for value in found if isinstance(found, list) else [found]:
            if isinstance(value, str):
                yield name, value


def _owner(condition: object) -> Owner | None:
    """The owner that a condition asks for, if that is all it asks."""
    if not isinstance(condition, FieldCondition) or condition.key not in OWNER_FIELDS:
        return None
    if not isinstance(condition.match, MatchValue) or not isinstance(condition.match.value, str):
        return None
    return condition.key, condition.match.value
