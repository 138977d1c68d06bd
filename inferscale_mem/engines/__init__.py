"""Engines: one file per way to run a model. ``open_engine`` shares one per process and configuration."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.errors import EngineClosedError, InputError, MissingDependencyError
from inferscale_mem.models import resolve_model
from inferscale_mem.protocols import ChatTokenizer, Engine, Scorer
from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.types import (
    Chunk,
    EncodePlan,
    EncodeReport,
    EngineInfo,
    EngineStatus,
    InjectReport,
    PromptPlan,
    Sampling,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


def open_engine(config: InferScaleConfig, key: bytes | None = None) -> Engine:
    """The engine of this configuration: started on first use, shared after that, stopped with the last ``close``.

    Args:
        config: ``model`` and ``engine`` are looked at.
        key: signs handles; the engine checks tags with it.

    Raises:
        MissingDependencyError: the engine's package is not installed.
        ModelError, EngineError: see ``VllmEngine`` and ``TransformersEngine``.
    """
    named: Any
    model: str | Callable[[], str]
    if config.engine.kind == "server":  # asked first: finding the model may mean to convert or download it
        named, model = (config.model, config.home), functools.partial(resolve_model, config)
    else:
        named = model = resolve_model(config)
    # A forked process has a copy of this table, but none of the threads that engines live by.
    identity = (named, config.engine, hashlib.sha256(key or b"").digest(), os.getpid())
    with _lock:
        shared = _open.get(identity)
        if shared is None or getattr(shared.engine, "dead", False):
            shared = _open[identity] = _Shared(_start(model, config.engine, key), identity)
        shared.users += 1
        return SharedEngine(shared)


def _start(model: str | Callable[[], str], config: EngineConfig, key: bytes | None) -> Engine:
    logger.info("Loading the engine's libraries")
    try:
        if config.kind == "server":
            from inferscale_mem.engines.vllm_server import VllmServerEngine

            return VllmServerEngine(model, config, key)
        assert isinstance(model, str)
        if config.kind == "transformers":
            from inferscale_mem.engines.transformers_embedded import TransformersEngine

            return TransformersEngine(model, config, key)
        from inferscale_mem.engines.vllm_local import VllmEngine

        return VllmEngine(model, config, key)
    except ModuleNotFoundError as error:
        if error.name not in ("vllm", "torch", "transformers", "httpx"):
            raise
        raise MissingDependencyError(error.name, {"transformers": "cpu"}.get(config.kind, config.kind)) from error


class _Shared:
    """An engine and how many hold it."""

    def __init__(self, engine: Engine, identity: tuple[Any, ...]) -> None:
        self.engine, self.identity, self.users = engine, identity, 0

    def release(self) -> None:
        with _lock:
            self.users -= 1
            if self.users:
                return
            if _open.get(self.identity) is self:
                del _open[self.identity]
            self.engine.close()


_lock = threading.Lock()
_open: dict[tuple[Any, ...], _Shared] = {}


class SharedEngine:
    """One holder's view of a shared engine; its ``close`` lets go, and the last one stops the engine."""

    def __init__(self, shared: _Shared) -> None:
        self._shared: _Shared | None = shared
        self._engine = shared.engine

    @property
    def _held(self) -> Engine:
        if self._shared is None:
            raise EngineClosedError("The engine is closed; open a new one.")
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """See protocols.Engine."""
        return self._engine.info

    @property
    def tokenizer(self) -> ChatTokenizer:
        """See protocols.Engine."""
        return self._engine.tokenizer

    def encode(self, plan: EncodePlan) -> EncodeReport:
        """See protocols.Engine."""
        return self._held.encode(plan)

    async def aencode(self, plan: EncodePlan) -> EncodeReport:
        """See protocols.Engine."""
        return await self._held.aencode(plan)

    def generate(self, plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        """See protocols.Engine."""
        return self._held.generate(plan, sampling)

    def agenerate(self, plan: PromptPlan, sampling: Sampling) -> AsyncIterator[Chunk]:
        """See protocols.Engine."""
        return self._held.agenerate(plan, sampling)

    def score(self, plan: PromptPlan, answer: Sequence[int]) -> tuple[NDArray[np.float32], InjectReport]:
        """See protocols.Scorer.

        Raises:
            InputError: this engine is none.
        """
        engine = self._held
        if not isinstance(engine, Scorer):
            raise InputError(f"{engine.info.version} does not give probabilities of whole answers; use vLLM.")
        return engine.score(plan, answer)

    def drop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        """See protocols.Engine."""
        self._held.drop(handles, alive)

    async def adrop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        """See protocols.Engine."""
        await self._held.adrop(handles, alive)

    def announce(self, announcement: Announcement) -> Announced:
        """See protocols.Engine."""
        return self._held.announce(announcement)

    def status(self) -> EngineStatus:
        """See protocols.Engine."""
        return self._held.status()

    def close(self) -> None:
        """Let go; safe to call twice."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.release()
