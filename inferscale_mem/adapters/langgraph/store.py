"""A LangGraph store whose items are facts of a memory: values stay JSON, and hits carry handles."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
)

from inferscale_mem.adapters.langgraph.items import Namespace, Row, metadata_of, row_of, text_of
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.types import OWNER_FIELDS, Scope

Owner = Callable[[Namespace], Mapping[str, str]]


class InferScaleStore(BaseStore):
    """``BaseStore`` over an InferScaleMemory. Durable as the memory is; encoding runs in the background.

    Search hits have a ``handle``: give them to ``ChatInferScale`` as ``memories=store.search(…)``.

    Who owns an item, and so who may be shown it, follows from its namespace. By default each namespace is an owner of
    its own, ``user_id`` being the namespace joined by "/". With ``namespace=("memories", "{user_id}")`` the part in
    braces names the owner, so that items are facts of the same user as those of ``memory.add(…, user_id=…)``.

    Args:
        memory: an InferScaleMemory.
        namespace: what namespaces look like, with "{user_id}", "{agent_id}" and "{run_id}" where owners stand. They
            may be longer; a shorter or different one is refused.
        fields: paths of the values that the model reads and searches look at; None: the whole value.
        ttl: defaults for items that expire, as LangGraph's stores take it.
    """

    supports_ttl = True

    def __init__(
        self,
        memory: Any,
        *,
        namespace: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        ttl: TTLConfig | None = None,
    ) -> None:
        if "service" not in dir(memory) or asyncio.iscoroutinefunction(getattr(memory, "add", None)):
            raise ConfigError(f"memory={memory!r} is no InferScaleMemory; give one (its async twin does not fit here).")
        if namespace is not None and not any(part in _PLACES for part in namespace):
            raise ConfigError(f"namespace={tuple(namespace)!r} names no owner; put '{{user_id}}' where it stands.")
        self._memory = memory
        self._pattern = tuple(namespace) if namespace is not None else None
        self._fields = fields
        self.ttl_config = ttl
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """One operation after the other."""
        with self._lock:
            return [self._do(op) for op in ops]

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As batch, in a thread."""
        return await asyncio.to_thread(self.batch, list(ops))

    def _do(self, op: Op) -> Result:
        if isinstance(op, GetOp):
            return self._get(op)
        if isinstance(op, PutOp):
            self._put(op)
            return None
        if isinstance(op, SearchOp):
            return self._search(op)
        if isinstance(op, ListNamespacesOp):
            return self._list(op)
        raise InputError(f"{type(op).__name__} is no operation of a store.")

    # Reading.

    def _get(self, op: GetOp) -> Item | None:
        row = self._row(op.namespace, op.key)
        if row is None:
            return None
        return (self._refreshed(row) if op.refresh_ttl else row).item()

    def _row(self, namespace: Namespace, key: str) -> Row | None:
        rows = self._rows(self._scope(namespace))
        return next((row for row in rows if row.namespace == namespace and row.key == key), None)

    def _rows(self, scope: Scope | None = None) -> list[Row]:
        """All live items of an owner, or of all."""
        self.sweep_ttl()
        rows = (row_of(fact) for fact in self._memory.service.index.facts(scope))
        return [row for row in rows if row is not None]

    def _search(self, op: SearchOp) -> list[SearchItem]:
        depth = len(op.namespace_prefix)
        rows = [row for row in self._rows() if row.namespace[:depth] == op.namespace_prefix and _fits(row, op.filter)]
        scored: list[tuple[Row, float | None]] = [(row, None) for row in rows]
        if op.query:
            scores = self._scores(op.query, rows)
            scored = [(row, scores[row.fact.id]) for row in rows if row.indexed and row.fact.id in scores]
            scored.sort(key=lambda pair: -(pair[1] or 0.0))
        found = scored[op.offset : op.offset + op.limit]
        if op.refresh_ttl:
            found = [(self._refreshed(row), score) for row, score in found]
        return [row.hit(self._memory.service.handle(row.fact), score) for row, score in found]

    def _scores(self, query: str, rows: Sequence[Row]) -> dict[str, float]:
        """Similarity of each fact to the query, owner by owner."""
        scores: dict[str, float] = {}
        for scope in {row.fact.scope for row in rows}:
            room = len(self._memory.service.index.facts(scope))
            found = self._memory.search(query, filters=scope.owners, top_k=max(room, 1), threshold=0.0)
            scores.update((str(hit["id"]), float(hit["score"])) for hit in found["results"])
        return scores

    def _list(self, op: ListNamespacesOp) -> list[Namespace]:
        known = {row.namespace for row in self._rows()}
        fitting = {n for n in known if all(_matches(n, condition) for condition in op.match_conditions or ())}
        cut = {namespace[: op.max_depth] for namespace in fitting}
        return sorted(cut)[op.offset : op.offset + op.limit]

    # Writing.

    def _put(self, op: PutOp) -> None:
        old = self._row(op.namespace, op.key)
        if op.value is not None:
            fields = op.index if isinstance(op.index, list) else self._fields
            created = old.created_at if old else datetime.now(UTC)
            self._store(op.namespace, op.key, op.value, created, op.ttl, op.index is not False, fields)
        if old is not None:  # behind the new one, so that at no time there is neither
            self._memory.delete(old.fact.id)

    def _store(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any],
        created_at: datetime,
        ttl: float | None,
        indexed: bool,
        fields: Sequence[str] | None,
    ) -> None:
        told = metadata_of(namespace, key, value, created_at=created_at, ttl=ttl, indexed=indexed)
        text = text_of(value, fields) or key
        owners = self._scope(namespace).owners
        done = self._memory.add([{"role": "user", "content": text}], infer=False, metadata=told, **owners)
        if not done["results"]:
            raise InputError(f"The value of {key!r} has nothing in it to remember but handles.")
        if ttl is not None:
            self._wake(time.time() + 60 * ttl)

    def _refreshed(self, row: Row) -> Row:
        if row.ttl is None:
            return row
        self._store(row.namespace, row.key, row.value, row.created_at, row.ttl, row.indexed, self._fields)
        self._memory.delete(row.fact.id)
        return self._row(row.namespace, row.key) or row

    def _scope(self, namespace: Namespace) -> Scope:
        if self._pattern is None:
            return Scope(user_id="/".join(quote(part, safe="") for part in namespace))
        fits = len(namespace) >= len(self._pattern) and all(
            part in _PLACES or part == given for part, given in zip(self._pattern, namespace, strict=False)
        )
        if not fits:
            raise InputError(f"Namespace {namespace!r} does not look like {self._pattern!r}, as the store was told.")
        return Scope.of({_PLACES[p]: given for p, given in zip(self._pattern, namespace, strict=False) if p in _PLACES})

    # Time.

    def sweep_ttl(self) -> int:
        """Delete what has expired, records included; how many items. Also runs by itself when the time has come."""
        with self._lock:
            rows = [row for row in map(row_of, self._memory.service.index.facts()) if row is not None]
            expired = [row for row in rows if row.expired]
            for row in expired:
                self._memory.delete(row.fact.id)
            waiting = [row.expires_at for row in rows if row.expires_at is not None and not row.expired]
            if waiting:
                self._wake(min(waiting))
            return len(expired)

    def _wake(self, at: float) -> None:
        if self._timer is not None and self._timer.is_alive():
            return
        self._timer = threading.Timer(max(0.1, at - time.time()), self._sweep_by_itself)
        self._timer.daemon = True
        self._timer.start()

    def _sweep_by_itself(self) -> None:
        self._timer = None
        if not self._memory_closed():
            self.sweep_ttl()

    def _memory_closed(self) -> bool:
        try:
            _ = self._memory.service
        except Exception:  # closed, or its engine is gone: nothing can be deleted any more
            return True
        return False


_PLACES = {f"{{{name}}}": name for name in OWNER_FIELDS}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda value, wanted: bool(value == wanted),
    "$ne": lambda value, wanted: bool(value != wanted),
    "$gt": lambda value, wanted: value is not None and bool(value > wanted),
    "$gte": lambda value, wanted: value is not None and bool(value >= wanted),
    "$lt": lambda value, wanted: value is not None and bool(value < wanted),
    "$lte": lambda value, wanted: value is not None and bool(value <= wanted),
}


def _fits(row: Row, wanted: Mapping[str, Any] | None) -> bool:
    return all(_compares(row.value.get(name), value) for name, value in (wanted or {}).items())


def _compares(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Mapping) or not any(str(name).startswith("$") for name in wanted):
        return bool(value == wanted)
    unknown = sorted(str(name) for name in wanted if name not in _COMPARE)
    if unknown:
        raise InputError(f"Filter operator {unknown[0]!r} is not known; use {', '.join(_COMPARE)}.")
    return all(_COMPARE[name](value, operand) for name, operand in wanted.items())


def _matches(namespace: Namespace, condition: MatchCondition) -> bool:
    path = tuple(condition.path)
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(wanted in ("*", given) for wanted, given in zip(path, part, strict=True))
