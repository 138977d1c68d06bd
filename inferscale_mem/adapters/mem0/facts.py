"""Mem0's rows and search hits as facts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

from inferscale_mem.errors import ScopeError
from inferscale_mem.types import OWNER_FIELDS, Fact, Scope

_CORE = frozenset({"data", "hash", "created_at", "updated_at", "text_lemmatized", *OWNER_FIELDS})


def revision(text: str, updated_at: object) -> str:
    """Changes with every update: Mem0 stamps ``updated_at`` whenever text or metadata change."""
    return hashlib.sha256(json.dumps([text, str(updated_at or "")]).encode()).hexdigest()[:16]


def fact_of(fact_id: str, payload: Mapping[str, Any]) -> Fact | None:
    """The fact in a row of the vector store; None for rows that are no facts (no text, no owner)."""
    text = payload.get("data")
    if not isinstance(text, str) or not text.strip():
        return None
    try:
        scope = Scope.of(payload)
    except ScopeError:
        return None
    return Fact(
        id=str(fact_id),
        text=text,
        scope=scope,
        revision=revision(text, payload.get("updated_at")),
        created_at=str(payload.get("created_at") or ""),
        metadata={name: value for name, value in payload.items() if name not in _CORE},
    )


def fact_of_hit(hit: Mapping[str, Any]) -> Fact | None:
    """The fact in a search result of Mem0, as ``fact_of``; its metadata are those that Mem0 lists."""
    return fact_of(str(hit.get("id", "")), {**hit, "data": hit.get("memory")})


def age(fact: Fact) -> tuple[float, str]:
    """Sorts facts oldest first; never equal for two facts, so that "older than" has no cycles."""
    try:
        said = datetime.fromisoformat(fact.created_at)
    except ValueError:
        return (0.0, fact.id)
    return ((said if said.tzinfo else said.replace(tzinfo=UTC)).timestamp(), fact.id)


def expiry(payload: Mapping[str, Any]) -> date | None:
    """The last day on which a fact is live; None if it never expires."""
    try:
        return date.fromisoformat(str(payload["expiration_date"])) if payload.get("expiration_date") else None
    except ValueError:
        return None  # as Mem0 reads it


def expired(last_day: date | None) -> bool:
    """Whether a fact that was live until the end of that day (UTC) is so no longer."""
    return last_day is not None and last_day < datetime.now(UTC).date()
