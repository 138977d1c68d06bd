"""A LangGraph store whose items are facts of a memory: values stay JSON, and hits carry handles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
)

from inferscale_mem.adapters.langgraph import items, matching
from inferscale_mem.adapters.langgraph.alarm import Alarm
from inferscale_mem.adapters.langgraph.items import Namespace, Row
from inferscale_mem.adapters.langgraph.owners import Owners
from inferscale_mem.adapters.mem0 import store_items
from inferscale_mem.errors import ConfigError, FactError, InputError
from inferscale_mem.types import Fact, Scope

logger = logging.getLogger(__name__)

KEPT = "An item that is kept, and not read."
"""Text of the fact that holds an item which was put with ``index=False``."""

AGAIN_S = 60.0
"""Seconds after which a sweep that failed is tried again."""


class InferScaleStore(BaseStore):
    """``BaseStore`` over an InferScaleMemory. Durable as the memory is; encoding runs in the background. Thread-safe.

    Search hits have a ``handle``: give them to ``ChatInferScale`` as ``memories=store.search(…)``.

    Who owns an item, and so who may be shown it, follows from its namespace. By default each namespace is an owner of
    its own, ``user_id`` being the namespace joined by "/". With ``namespace=("memories", "{user_id}")`` the part in
    braces names the owner, so that items are facts of the same user as those of ``memory.add(…, user_id=…)``. A fact
    whose owner is another one than its namespace's is no item of this store.

    Args:
        memory: an InferScaleMemory; several stores may share one.
        namespace: what namespaces look like, with "{user_id}", "{agent_id}" and "{run_id}" where owners stand. They
            may be longer; a shorter or different one is refused.
        fields: paths of the values that the model reads and searches look at; None: the whole value.
        ttl: defaults for items that expire, as LangGraph's stores take it.

    Raises:
        ConfigError: that is no memory, or the namespace does not say who the owner is.
        InputError: ``fields`` or the default ttl are none. Operations raise it for what they cannot use.
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
            raise ConfigError(
                f"memory={memory!r} is no InferScaleMemory; give one. In async apps, too: its store has aput, aget, "
                "asearch, adelete and alist_namespaces, which do not block the loop."
            )
        items.check_ttl((ttl or {}).get("default_ttl"))
        self._memory = memory
        self._owners = Owners(namespace)
        self._fields = items.check_fields(fields)
        self.ttl_config = ttl
        self._alarm = Alarm(self._sweep_by_itself)
        self._swept = False
        self._warned = False

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """One operation after the other."""
        if not self._swept:  # what is left from an earlier process
            self.sweep_ttl()
            self._swept = True
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
        found = [row for row in self._rows(self._owners.scope(op.namespace)) if row.names(op.namespace, op.key)]
        if op.refresh_ttl:
            self._renew(found)
        return found[0].item() if found else None

    def _search(self, op: SearchOp) -> list[SearchItem]:
        matching.check_filter(op.filter)
        prefix = tuple(op.namespace_prefix)
        rows = [row for row in self._rows(self._owners.scope_under(prefix)) if row.namespace[: len(prefix)] == prefix]
        rows = [row for row in rows if matching.fits(row.value, op.filter)]
        scored: list[tuple[Row, float | None]] = [(row, None) for row in rows]
        if op.query and op.query.strip():
            scores = self._scores(op.query, rows)
            scored = [(row, scores[row.fact.id]) for row in rows if row.indexed and row.fact.id in scores]
            scored.sort(key=lambda pair: -(pair[1] or 0.0))
        found = scored[op.offset : op.offset + op.limit]
        if op.refresh_ttl:
            self._renew(row for row, _ in found)
        handle = self._memory.service.handle
        return [row.hit(None if row.kept_only else handle(row.fact), score) for row, score in found]

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
        fitting = {n for n in known if all(matching.matches(n, condition) for condition in op.match_conditions or ())}
        cut = {namespace[: op.max_depth] for namespace in fitting}
        return sorted(cut)[op.offset : op.offset + op.limit]

    def _rows(self, scope: Scope | None = None) -> list[Row]:
        """All live items of an owner, or of all."""
        newest = {(row.namespace, row.key): row for row in self._copies(scope)}
        return [row for row in newest.values() if not row.expired]

    def _copies(self, scope: Scope | None = None) -> list[Row]:
        """All that is stored of them, oldest first: of one item there is an older copy while it is being replaced, and
        there are more if several processes have written it at once.
        """
        return [row for fact in self._memory.service.index.facts(scope) if (row := self._read(fact)) is not None]

    def _read(self, fact: Fact) -> Row | None:
        """The item in a fact. Metadata are whatever somebody has written, and may be no error for everybody else."""
        try:
            row = items.row_of(fact)
            if row is None or self._owners.scope(row.namespace) == fact.scope:
                return row
            wrong = "it belongs to another owner than its namespace"
        except ValueError as error:
            wrong = str(error)
        if not self._warned:
            self._warned = True
            logger.warning("Fact %s is marked as an item of a store, but no item of this one: %s.", fact.id, wrong)
        return None

    # Writing.

    def _put(self, op: PutOp) -> None:
        scope = self._owners.scope(op.namespace)
        with store_items.writing(self._memory):
            old = [row for row in self._copies(scope) if row.names(op.namespace, op.key)]
            if op.value is not None:
                known = old and not old[-1].expired
                self._store(op, scope, created_at=old[-1].created_at if known else datetime.now(UTC))
            self._delete(old)  # behind the new one, so that at no time there is neither

    def _store(self, op: PutOp, scope: Scope, created_at: datetime) -> None:
        value, written = items.value_of(op.key, op.value)
        ttl = items.check_ttl(op.ttl)
        fields = self._fields if op.index is None or op.index is False else items.check_fields(op.index)
        kept_only = op.index is False
        text = "" if kept_only else items.text_of(value, fields).strip()
        ends = None if ttl is None else time.time() + 60 * ttl
        told = items.metadata_of(
            op.namespace,
            op.key,
            written,
            created_at=created_at,
            ttl=ttl,
            expires_at=ends,
            indexed=bool(text),
            kept_only=kept_only,
        )
        said = [{"role": "user", "content": KEPT if kept_only else text or op.key}]
        try:
            added = self._memory.add(said, infer=False, metadata=told, **scope.owners)["results"]
        except FactError as error:
            raise FactError(
                f"The item {op.key!r} of {op.namespace!r} cannot be read by the model: {error} Or name the parts of it "
                "that are to be read, with index=['field'], or none: index=False keeps it, whatever its size."
            ) from error
        if not added:
            raise InputError(f"The value of {op.key!r} has nothing in it to remember but handles.")
        if ends is not None:
            self._alarm.set(ends)

    def _delete(self, rows: Iterable[Row]) -> None:
        for row in rows:
            try:
                self._memory.delete(row.fact.id)
            except ValueError:  # Mem0's word for one that is gone already
                if self._memory.service.index.get(row.fact.id) is not None:
                    raise

    # Time.

    def _renew(self, rows: Iterable[Row]) -> None:
        """Move the end of what was read. The fact stays as it is, and with it every handle and the record."""
        for row in rows:
            if row.ttl is not None:
                with store_items.writing(self._memory):
                    store_items.set_end(self._memory, row.fact.id, time.time() + 60 * row.ttl)

    def sweep_ttl(self) -> int:
        """Delete what has expired, records included; how many items. Also runs by itself when the time has come."""
        with store_items.writing(self._memory):
            copies = self._copies()
            newest = {(row.namespace, row.key): row for row in copies}
            gone = [row for row in copies if self._is_over(row) or self._is_over(newest[row.namespace, row.key])]
            self._delete(gone)
            left = {row.fact.id for row in copies} - {row.fact.id for row in gone}
            waiting = [row.expires_at for row in copies if row.expires_at is not None and row.fact.id in left]
            if waiting:
                self._alarm.set(min(waiting))
            return len({(row.namespace, row.key) for row in gone})

    def _is_over(self, row: Row) -> bool:
        """Whether an item has expired; read again, since another process may have moved its end."""
        fact = self._memory.service.index.get(row.fact.id) if row.expired else None
        now = self._read(fact) if fact is not None else None
        return now is not None and now.expired

    def _sweep_by_itself(self) -> None:
        if self._memory_closed():
            return
        try:
            self.sweep_ttl()
        except Exception as error:
            if not self._memory_closed():
                logger.warning("Items that have expired are still there, and deleted later: %s", error)
                self._alarm.set(time.time() + AGAIN_S)

    def _memory_closed(self) -> bool:
        try:
            _ = self._memory.service
        except Exception:  # closed, or its engine is gone: nothing can be deleted any more
            return True
        return False
