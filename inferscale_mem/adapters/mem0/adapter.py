"""The half of both memories that is the same for sync and async: construction, settings, and taking things apart."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from mem0.configs.base import MemoryConfig
from mem0.llms.base import LLMBase
from mem0.memory.storage import SQLiteManager
from mem0.vector_stores.base import VectorStoreBase
from mem0.vector_stores.qdrant import Qdrant

from inferscale_mem.adapters.mem0 import defaults, forking, inputs, opening
from inferscale_mem.adapters.mem0.core import Core
from inferscale_mem.adapters.mem0.entry import Entry
from inferscale_mem.adapters.mem0.extraction import CheckedLLM, Extraction, extracting
from inferscale_mem.adapters.mem0.history import History, repair
from inferscale_mem.adapters.mem0.index import VectorIndex
from inferscale_mem.adapters.mem0.journal import ALL, Journal
from inferscale_mem.adapters.mem0.llm import EngineLLM
from inferscale_mem.adapters.mem0.resident_qdrant import ResidentQdrant, resident
from inferscale_mem.adapters.mem0.store import FactStore
from inferscale_mem.adapters.mem0.turns import TurnLog
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.encoding import parse_policy
from inferscale_mem.engines import open_engine
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.handles import HandleSigner, load_key
from inferscale_mem.models import is_packaged, resolve_model
from inferscale_mem.protocols import Engine
from inferscale_mem.service import MemoryService
from inferscale_mem.types import Scope

logger = logging.getLogger(__name__)

Settings = InferScaleConfig | Mapping[str, Any] | None

_emptying = contextvars.ContextVar("inferscale-mem0-emptying", default=False)


class Adapter:
    """Comes in front of Mem0's class in the bases.

    Args:
        config: Mem0's settings; what they leave out is filled in: everything runs on this machine.
        inferscale: settings of this package; what they leave out comes from the environment.
        engine: an engine to use; it is not closed with the memory.

    Raises:
        ConfigError: a setting is wrong, or embedder and collection do not fit together.
        ModelError: the configured model or embedder does not exist.
        StoreLockedError: the embedded store is in use.
        StoreError: store or history cannot be opened.
    """

    # Mem0's own tests, and some apps, make memories without calling __init__: those are plain Mem0.
    _core: Core | None = None
    _raw_store: Any = None
    _entity_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, config: MemoryConfig | None = None, *, inferscale: Settings = None, engine: Engine | None = None
    ) -> None:
        opening.check_objects(config, engine)
        settings = read_settings(inferscale)
        parse_policy(settings.encoding.policy)
        if engine is None and not is_packaged(settings):
            resolve_model(settings)
        if config is None or isinstance(config, MemoryConfig):
            config = defaults.complete(config, settings)
        try:
            super().__init__(config)  # type: ignore[call-arg]  # Mem0's class comes behind this one
            self._adopt(settings, engine)
        except Exception as error:
            self._release()
            named = opening.explained(error, config, settings.home)
            if named is not None:
                raise named from error
            raise
        except BaseException:
            self._release()
            raise

    @classmethod
    def from_config(cls, config_dict: dict[str, Any], *, engine: Engine | None = None) -> Self:
        """A memory from Mem0's configuration dict; the section "inferscale" holds the settings of this package.

        Raises:
            ConfigError, ...: as the constructor; or no dict, or a key that nobody reads.
            pydantic.ValidationError: as Mem0.
        """
        given = opening.check_dict(config_dict)
        settings = read_settings(given.pop("inferscale", None))
        return cls(defaults.read(given, settings), inferscale=settings, engine=engine)

    @property
    def service(self) -> MemoryService:
        """What memory and chat model share. The first use waits until the engine has started.

        Raises:
            StoreError: the memory is closed.
            ModelError, EngineError, ...: the engine cannot be opened.
        """
        if self._core is None:
            raise ConfigError("This memory was made without its constructor, or over no Mem0 vector store.")
        return self._core.service

    @property
    def open_service(self) -> MemoryService | None:
        """``service`` if its engine has started; None before that, and once closed. Starts nothing."""
        return None if self._core is None else self._core.open_service

    @property
    def entity_store(self) -> Any:
        """Mem0's store of entities. Made once, whoever asks first."""
        me, store = cast(Any, self), self._raw_store
        with self._entity_lock:
            if me._entity_store is None and isinstance(store, ResidentQdrant):
                me._entity_store = store.sibling(f"{me.collection_name}_entities")  # as Mem0 calls it
            return super().entity_store  # type: ignore[misc]  # Mem0's class comes behind this one

    # Putting together.

    def _adopt(self, settings: InferScaleConfig, engine: Engine | None) -> None:
        """Put index, handles and engine around the parts that Mem0 has made."""
        me: Any = self
        if not isinstance(me.vector_store, VectorStoreBase):
            logger.warning("%s is no Mem0 vector store: no handles, no records.", type(me.vector_store).__name__)
            return
        self._raw_store = me.vector_store = resident(me.vector_store)
        defaults.fit_dims(me.embedding_model, me.vector_store, me.config)
        key = load_key(settings)
        signer = HandleSigner(key, defaults.store_name(me.config), settings.handles.expire_after_s)
        opening.make_folder(settings.home, "conversations (home)")
        turns = TurnLog(settings.home / f"turns-{re.sub(r'[^A-Za-z0-9]+', '-', signer.store)}.db")
        here: Any = weakref.proxy(self)  # a memory that is dropped must go at once, and its store's lock with it
        index = VectorIndex(
            signer.store,
            lambda: here._raw_store,
            signer.handle_id,
            lambda texts: here.embedding_model.embed_batch(texts, "add"),
            turns,
            exclusive=bool(getattr(me.vector_store, "is_local", False)),
        )
        opener = (lambda: open_engine(settings, key)) if engine is None else (lambda: engine)
        history = None if me.config.history_db_path == ":memory:" else Path(me.config.history_db_path)
        core = Core(settings, index, signer, opener, Journal(history), turns, owned=engine is None)
        self._core = core
        forking.watch(self)
        self._watch()
        self._recover(core.journal)
        if isinstance(me.llm, EngineLLM):
            me.llm.attach(lambda: core.service.engine)
        elif isinstance(me.llm, LLMBase):
            me.llm = CheckedLLM(me.llm)

    def _watch(self) -> None:
        """Follow what is written to the vector store and the history that Mem0 has made."""
        me, core = cast(Any, self), self._core
        if core is None:
            return
        if type(me.db) is SQLiteManager:
            me.db = History.over(me.db, core.journal, core.turns)
        if not isinstance(me.vector_store, FactStore):
            self._raw_store = resident(me.vector_store)
            me.vector_store = FactStore(
                self._raw_store, core.index, core.changed, core.journal, core.gate.part, core.going
            )

    def _reset(self, reset: Callable[[], object]) -> None:
        """Mem0's reset, and what follows from it. If it fails, the memory goes on with what is left."""
        core = self._core
        with core.journal.resetting() if core is not None else contextlib.nullcontext():
            try:
                reset()
            finally:
                self._watch()
        if core is not None:
            core.forget_turns(None)

    def _recover(self, journal: Journal) -> None:
        """Finish what a process was doing when it died."""
        me: Any = self
        with journal.interrupted() as rows:
            if ALL in rows:
                logger.warning("A reset was interrupted when a process died; it is finished now.")
                me.vector_store.reset()
                me.db.reset()
                me.db.close()
                me.db = SQLiteManager(me.config.history_db_path)
                self._watch()
            repair(me.vector_store, me.db, rows - {ALL})

    def _release(self) -> None:
        """Close what Mem0 leaves open: the vector store's client, and with it the lock of the embedded store."""
        me: Any = self
        if self._core is not None and self._core.forked:
            return
        store = self._raw_store or getattr(me, "vector_store", None)
        if isinstance(store, VectorStoreBase) and getattr(me.config.vector_store.config, "client", None) is None:
            close = getattr(getattr(store, "client", None), "close", None) or getattr(store, "close", None)
            if callable(close):
                close()
        with contextlib.suppress(AttributeError):  # never got that far
            super().close()  # type: ignore[misc]  # Mem0's class comes behind this one

    def leave_to_parent(self) -> None:
        """This is the copy in a process that was forked: nothing here may be used, or closed."""
        if self._core is not None:
            self._core.leave_to_parent()
        forking.let_go(getattr(self._raw_store, "client", None))

    def __reduce__(self) -> Any:
        raise ConfigError("A memory cannot be copied, nor sent to another process; open one there.")

    def __del__(self) -> None:
        """As with Mem0, a memory that was never closed lets go of its store when nothing refers to it any more."""
        core = self._core
        if core is None or core.closed or core.forked or sys.is_finalizing():
            return
        self._release()
        # Closing waits for the engine; whoever dropped the memory does not.
        threading.Thread(target=core.close, name="inferscale-close", daemon=True).start()

    # What the methods of both have in common.

    def _open_core(self, *, alone: bool = False) -> Entry:
        """Around each public operation: the core, if this memory has one; StoreError after ``close``."""
        return Entry(self._core, alone=alone)

    def _row_id(self, memory_id: str) -> Any:
        """The id as the row has it; InputError if it is none."""
        plain = self._core is None
        return memory_id if plain else inputs.row_id(memory_id, uuids=isinstance(self._raw_store, Qdrant))

    def _close(self) -> None:
        if self._core is None:
            self._release()
        else:
            self._core.close(self._release)

    def _extracting(
        self, messages: Any, owners: Mapping[str, Any], infer: bool, prompt: str | None
    ) -> contextlib.AbstractContextManager[None]:
        """Around Mem0's pipeline: what its one call of the LLM is about."""
        core = self._core
        if core is None or not infer:
            return contextlib.nullcontext()
        check: Callable[[str], None] = lambda text: core.service.check_fact(text)  # noqa: E731
        instructions = prompt or getattr(self, "custom_instructions", None) or ""
        about = "assistant" if owners.get("agent_id") and not owners.get("user_id") else "user"
        return extracting(Extraction(messages, instructions, about, check, Scope.of(owners)))


@contextlib.contextmanager
def emptying() -> Iterator[None]:
    """Around a ``delete_all``: a fact that somebody else deletes meanwhile is no error there."""
    token = _emptying.set(True)
    try:
        yield
    finally:
        _emptying.reset(token)


def is_emptying() -> bool:
    """Whether this is a part of a ``delete_all``."""
    return _emptying.get()


def read_settings(inferscale: Settings) -> InferScaleConfig:
    """Settings as given, else from the environment.

    Raises:
        ConfigError: neither settings nor a mapping of them, or one of them is wrong.
    """
    if isinstance(inferscale, InferScaleConfig):
        return inferscale
    if inferscale is None or isinstance(inferscale, Mapping):
        return InferScaleConfig.from_env(inferscale)
    raise ConfigError(f"inferscale must be an InferScaleConfig or a dict, not {type(inferscale).__name__}.")


def search_scope(filters: object, others: Mapping[str, Any]) -> Scope | None:
    """The owner that a ``search`` or ``get_all`` is for; None where Mem0 refuses the call with its own words.

    Raises:
        MissingOwnerError, ScopeError: the filters name none, or not one.
        InputError: they are no dict.
    """
    if not isinstance(filters, Mapping | None):
        raise InputError(f"filters must be a dict, e.g. filters={{'user_id': 'u1'}}, not {type(filters).__name__}.")
    if set(others) & {"user_id", "agent_id", "run_id"}:
        return None
    return inputs.owner_scope(filters, "in filters, e.g. filters={'user_id': 'u1'}")
