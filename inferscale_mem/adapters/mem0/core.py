"""What both memories share, sync and async: facts, handles, and an engine that is opened when it is first needed."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from inferscale_mem.adapters.mem0 import inputs, store_items
from inferscale_mem.adapters.mem0.facts import fact_of_hit
from inferscale_mem.adapters.mem0.gate import CLOSED, Gate
from inferscale_mem.adapters.mem0.index import VectorIndex
from inferscale_mem.adapters.mem0.journal import Journal
from inferscale_mem.adapters.mem0.turns import TurnLog
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import EngineError, HandleError, InferScaleError, InputError, ScopeError, StoreError
from inferscale_mem.handles import HandleSigner, find, split
from inferscale_mem.protocols import Engine
from inferscale_mem.recording.owed import OwedDrops
from inferscale_mem.service import MemoryService
from inferscale_mem.types import Fact, Scope

logger = logging.getLogger(__name__)

Open = Callable[[], Engine]

LEAVE_S = 30.0
"""Seconds that ``close`` gives the operations that are under way. The engine is closed by then."""


class Core:
    """Facts, handles and engine of one memory. Thread-safe.

    The engine is opened in a thread of its own, by the first thing that will need it: ``start`` does not wait for it,
    ``service`` does. Listing, resolving and deleting never need it.

    Args:
        settings: of this package.
        index: the facts.
        signer: makes and checks handles.
        open_engine: opens the engine.
        journal: of what is being written.
        owned: whether ``close`` closes the engine.
        turns: what was said.
    """

    def __init__(
        self,
        settings: InferScaleConfig,
        index: VectorIndex,
        signer: HandleSigner,
        open_engine: Open,
        journal: Journal,
        turns: TurnLog,
        *,
        owned: bool,
    ) -> None:
        self.settings = settings
        self.index = index
        self.signer = signer
        self.journal = journal
        self._open_engine = open_engine
        served = settings.engine.kind == "server"  # it outlives this process
        path = settings.home / f"owed-{re.sub(r'[^A-Za-z0-9]+', '-', signer.store)}.db"
        self._owed = OwedDrops(path if served else None)
        self._owned = owned
        self.turns = turns
        self._lock = threading.Lock()
        self._opening: Future[MemoryService] | None = None
        self._service: MemoryService | None = None
        self.gate = Gate()
        self.items_lock = threading.RLock()
        """Held by whoever writes items of LangGraph stores; taken before the gate."""
        self._closing = threading.RLock()
        self._closed = False
        self._taken_apart = False
        self.forked = False
        """Whether this is a copy in a process that was forked."""

    # The engine.

    def start(self) -> Future[MemoryService]:
        """Begin to open the engine, if nobody has yet."""
        with self._lock:
            self.check_open()
            if self._opening is None:
                self._opening = Future()
                threading.Thread(target=self._open, args=(self._opening,), name="inferscale-open", daemon=True).start()
            return self._opening

    @property
    def service(self) -> MemoryService:
        """What memory and chat model share; waits for the engine.

        Raises:
            StoreError: the memory is closed.
            ModelError, EngineError, ...: why the engine could not be opened, each time it is asked for.
        """
        return self.start().result()

    @property
    def open_service(self) -> MemoryService | None:
        """The service if it is open; starts nothing."""
        return None if self._closed else self._service

    def _open(self, opening: Future[MemoryService]) -> None:
        engine = None
        try:
            engine = self._open_engine()
            service = MemoryService(engine, self.index, self.signer, self.settings.encoding, owed=self._owed)
        except BaseException as error:
            if engine is not None and self._owned:
                engine.close()
            logger.error("The engine cannot be opened: %s", error)  # search goes on without it; add and service raise
            opening.set_exception(error)
            return
        self._service = service
        service.recorder.rebuild()
        opening.set_result(service)

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed

    @property
    def taken_apart(self) -> bool:
        """Whether ``close`` has let go of the files."""
        return self._taken_apart

    def check_open(self) -> None:
        """Raise StoreError after ``close``, or after a fork."""
        if self.forked:
            raise StoreError(
                "This memory was opened before the process forked, and stays with the parent. Open a new one in the "
                "child, in another home or at a Qdrant server: embedded Qdrant is of one process at a time."
            )
        if self._closed:
            raise StoreError(CLOSED)

    def leave_to_parent(self) -> None:
        """This is the copy in a process that was forked."""
        self.forked = True
        self.journal.leave_to_parent()

    def close(self, release: Callable[[], None] = lambda: None) -> None:
        """Stop encoding, close the engine if it is ours, wait for what is under way, and let go of the files.

        An engine that is still starting is waited for. What is under way fails if it needs the engine, and else comes
        to its end.

        Args:
            release: closes store and history, when nobody uses them any more.
        """
        if self.forked:
            return
        with self._lock:
            self._closed = True
            opening = self._opening
        with self._closing:  # a second one returns when the first is done
            if self._taken_apart:
                return
            self.gate.shut()
            try:
                if opening is not None and opening.exception() is None:
                    service = opening.result()
                    service.close()
                    if self._owned:
                        service.engine.close()
            finally:
                if not self.gate.emptied(LEAVE_S):
                    logger.warning("The memory is closed while operations are under way; they will fail.")
                self._taken_apart = True
                self.turns.close()
                self.journal.close()
                release()

    # Facts that come and go.

    def going(self, rows: Sequence[str] | None) -> None:
        """The store lets go of these rows' facts, or of all: a server has to hear of it, even if this process dies."""
        if self.settings.engine.kind == "server":
            found = self.index.facts() if rows is None else [self.index.get(row) for row in rows]
            self._owed.note(self.signer.mint(fact) for fact in found if fact is not None)

    def changed(self, new: Sequence[Fact], gone: Sequence[Fact]) -> None:
        """Facts were written to the store. Without an engine there are no records yet, and none to be dropped."""
        service = self._record_keeper()
        if service is None:
            if self.settings.engine.kind == "server":
                self._owed.add(self.signer.mint(fact) for fact in gone)
            return
        if gone:
            try:
                service.remove(gone)
            except EngineError as error:
                # The facts are gone from the index, so no handle leads to them here; a server that is only out of
                # reach still knows their handles.
                logger.warning("The records of %d facts are dropped when the engine is back: %s", len(gone), error)
        if new := [fact for fact in new if not store_items.is_kept_only(fact.metadata)]:
            service.announce(new)
            # Encoding takes the processors from the caller, who still has a line of history to write.
            self.gate.afterwards(lambda: service.recorder.add(new))

    def _record_keeper(self) -> MemoryService | None:
        """The service, if records may be somewhere: with an engine of this process not before it is open.

        On a server there may be some from an earlier process, and handles are worth nothing before it knows them.
        """
        if self.settings.engine.kind != "server":
            return self._service
        try:
            return self.service
        except InferScaleError as error:
            logger.warning("The server is not told what has changed: %s", error)
            return None

    def sweep(self) -> None:
        """Drop the records of facts that have expired."""
        gone = self.index.sweep()
        if gone:
            self.changed([], gone)

    def forget_turns(self, scope: Scope | None) -> None:
        """Delete what was said in a scope (None: in all)."""
        self.turns.forget(scope)

    # What callers give and get.

    def prepare_add(
        self, messages: object, owners: Mapping[str, Any], metadata: object, infer: bool
    ) -> list[dict[str, Any]]:
        """Everything that can be wrong with an ``add``, found before anything is stored; the messages to store."""
        scope = inputs.owner_scope(owners, "to add")
        store_items.check_add(inputs.check_metadata(metadata))
        cleaned = inputs.clean_messages(messages)
        if infer:
            cleaned = inputs.without_recalled(cleaned, lambda: (fact.text for fact in self.index.facts(scope)))
        if not cleaned:
            self.check_open()
            return []
        service = self.service
        for text in [] if infer else inputs.raw_facts(cleaned):
            service.check_fact(text)
        self.sweep()
        self.turns.say(scope, cleaned)
        self.turns.use(scope)
        return cleaned

    def prepare_update(
        self, memory_id: object, text: str | None, data: str | None, metadata: dict[str, Any] | None
    ) -> tuple[str | None, str | None, dict[str, Any] | None]:
        """The same for an ``update``: its text, ``data`` (an old name for it) and metadata, as they may be stored."""
        told = inputs.check_metadata(metadata)
        store_items.check_update(self.index.get(str(memory_id)), text if text is not None else data, told)
        clean = [None if given is None else inputs.fact_text(given) for given in (text, data)]
        for given in clean:
            if given is not None:
                self.service.check_fact(given)
        return clean[0], clean[1], metadata

    def prepare_search(self, query: str, scope: Scope, memory_format: str) -> None:
        """Everything that can be wrong with a query; and the engine starts, if handles are wanted."""
        inputs.check_unicode(query, "query")
        if memory_format == "handle":
            self.start()
        self.turns.use(scope)
        self.sweep()

    def present(self, results: dict[str, Any], scope: Scope, memory_format: str) -> dict[str, Any]:
        """Search results as the caller gets them: only the scope's, and handles in place of texts.

        Raises:
            InputError: the format is neither "handle" nor "text".
        """
        check_format(memory_format)
        hits = [hit for hit in within(scope, results["results"]) if not store_items.is_kept_only(hit.get("metadata"))]
        handed_out = []
        for hit in hits if memory_format == "handle" else []:
            fact = fact_of_hit(hit)
            if fact is not None:
                self.index.learn(fact)
                hit["memory"] = self.signer.issue(fact)
                handed_out.append(fact)
        if handed_out and (service := self._record_keeper()) is not None:
            service.announce(handed_out)
        return {**results, "results": hits}

    def resolve(self, what: Any, scope: Scope | None = None) -> Any:
        """The same structure with texts in place of handles; what is no valid handle stays as it is."""
        if isinstance(what, str):
            return self._resolve_text(what, scope)
        if isinstance(what, Mapping):
            return {key: self.resolve(value, scope) for key, value in what.items()}
        if isinstance(what, list):
            return [self.resolve(item, scope) for item in what]
        return tuple(self.resolve(item, scope) for item in what) if isinstance(what, tuple) else what

    def _resolve_text(self, text: str, scope: Scope | None) -> str:
        parts, end = [], 0
        for found in find(text):
            fact = self._fact(found.handle)
            if fact is not None and (scope is None or scope.covers(fact.scope)):
                parts += [text[end : found.start], fact.text]
                end = found.end
        return "".join([*parts, text[end:]])

    def _fact(self, handle: str) -> Fact | None:
        try:
            handle_id, _ = split(handle)
        except HandleError:
            return None
        fact = self.index.by_handle_id(handle_id)
        return fact if fact is not None and self.signer.verify(handle, fact.scope) else None


def check_format(memory_format: str) -> None:
    """Raise InputError unless this is a form that ``search`` can give memories in."""
    if memory_format not in ("handle", "text"):
        raise InputError(f"memory_format={memory_format!r} is not known; use 'handle' or 'text'.")


def within(scope: Scope, hits: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hits that belong to the scope: filters with operators inside can let others through."""
    every = [dict(hit) for hit in hits]
    kept = [hit for hit in every if _inside(scope, hit)]
    if len(kept) < len(every):
        logger.warning("%d results of other owners were left out; check the filters.", len(every) - len(kept))
    return kept


def _inside(scope: Scope, hit: Mapping[str, Any]) -> bool:
    try:
        return scope.covers(Scope.of(hit))
    except ScopeError:
        return False
