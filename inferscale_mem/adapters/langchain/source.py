"""Where a chat model's engine and facts come from: a memory, a service, an engine, or the settings to open one."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from inferscale_mem.adapters.langchain.detached import Detached
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.engines import open_engine
from inferscale_mem.errors import ConfigError
from inferscale_mem.handles import load_key
from inferscale_mem.protocols import Engine
from inferscale_mem.service import MemoryService

WAYS = ("memory", "service", "engine")
"""Objects that a chat model can be given; each knows its engine."""


def check_source(memory: Any, service: Any, engine: Any, settings: InferScaleConfig | None) -> None:
    """Refuse what can be no source; starts nothing.

    Raises:
        ConfigError: several are given, one is something else, or one that was to be used is None.
    """
    given = [name for name, value in zip(WAYS, (memory, service, engine), strict=True) if value is not None]
    if len(given) > 1 or (given and settings is not None):
        also = "" if settings is None else " and settings of an engine (model, base_url, config)"
        raise ConfigError(f"Give one of memory=, service= and engine=, or the settings; got {', '.join(given)}{also}.")
    if not given and settings is None:
        raise ConfigError(
            "memory=None, service=None or engine=None is no source of answers; give one that is open, or leave it out "
            "to open an engine as configured (model=, base_url=, the environment, else the packaged model)."
        )
    # By name only: asking a memory for its service starts the engine.
    if memory is not None and "service" not in dir(memory):
        raise ConfigError(f"memory={memory!r} is no memory; give an InferScaleMemory or AsyncInferScaleMemory.")
    if service is not None and not isinstance(service, MemoryService):
        raise ConfigError(f"service={service!r} is no MemoryService; give memory.service, or memory=.")
    if engine is not None and not isinstance(engine, Engine):
        raise ConfigError(f"engine={engine!r} is no engine; give what open_engine returns, or model=.")


def read_settings(
    config: Mapping[str, Any] | InferScaleConfig | None, *, alone: bool, **given: Any
) -> InferScaleConfig | None:
    """Settings of the engine to open; None if nothing is set, and something else is the source.

    Args:
        config: settings, nested or ready.
        alone: nothing else was named as a source, so that an engine is opened even if nothing is set.
        given: ``model``, and what goes into ``engine``; None where not given.

    Raises:
        ConfigError: a setting nobody knows, or one that is given twice.
    """
    every = {name: value for name, value in given.items() if value is not None}
    # The others are about a server, and mean nothing without one.
    told = every if "base_url" in every else {name: value for name, value in every.items() if name == "model"}
    if isinstance(config, InferScaleConfig):
        if told:
            raise ConfigError(f"config= is complete; put {next(iter(told))} into it.")
        return config
    if config is None and not told and not alone:
        return None
    found = _settings(config or {}, told)
    return _settings(config or {}, every) if told is not every and found.engine.base_url else found


def _settings(config: Mapping[str, Any], told: Mapping[str, Any]) -> InferScaleConfig:
    settings = dict(config)
    if "model" in told:
        settings["model"] = told["model"]
    if engine := {name: value for name, value in told.items() if name != "model"}:
        settings["engine"] = {**(config.get("engine") or {}), **engine}
    return InferScaleConfig.from_env(settings)


class _Opened:
    """An engine that was opened for chat models, and their service; both end with the last of them."""

    def __init__(self, settings: InferScaleConfig) -> None:
        self.engine = open_engine(settings, load_key(settings))
        weakref.finalize(self, _close_apart, self.engine).atexit = False
        self.detached = Detached(self.engine)


def _close_apart(engine: Engine) -> None:
    """Close an engine that nothing refers to any more, in a thread of its own.

    The garbage collector finds that out wherever it happens to run: while an engine is being opened, too, in the thread
    that does that, and so holds the lock that closing one needs.
    """
    threading.Thread(target=engine.close, name="inferscale-close").start()


@atexit.register
def _close_opened() -> None:
    for opened in list(_opened.values()):
        opened.engine.close()


_lock = threading.Lock()
_detached: weakref.WeakValueDictionary[int, Detached] = weakref.WeakValueDictionary()
_opened: weakref.WeakValueDictionary[InferScaleConfig, _Opened] = weakref.WeakValueDictionary()

Holder = Detached | _Opened


def hold(engine: Any, settings: InferScaleConfig | None) -> Holder:
    """What has to be kept as long as the service of an engine alone is used; shared by all who use the same."""
    with _lock:
        if settings is None:
            held = _detached.get(id(engine))
            if held is None:
                held = _detached[id(engine)] = Detached(engine)
            return held
        opened = _opened.get(settings)
        if opened is None:
            opened = _opened[settings] = _Opened(settings)
        return opened


def service_of(holder: Holder) -> MemoryService:
    """The service that is held."""
    return holder.service if isinstance(holder, Detached) else holder.detached.service
