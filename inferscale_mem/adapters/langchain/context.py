"""Memories and scope out of a RunnableConfig: its metadata, or its ``configurable``.

Both may hold ``user_id``, ``agent_id`` and ``memories``, and ``inferscale``, a mapping of these and ``run_id`` or
``scope``. (A plain ``run_id`` is somebody else's: LangChain and LangGraph name their own runs so.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import BaseRunManager
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from inferscale_mem.errors import InputError

KEY = "inferscale"
PLAIN = ("user_id", "agent_id", "memories")
OWNERS = ("scope", "user_id", "agent_id", "run_id")


def with_context(call: Mapping[str, Any], run_manager: BaseRunManager | None) -> dict[str, Any]:
    """The keywords of a call, and what they leave open from the run's metadata, then from its configuration.

    Owners are taken from the first of these places that names any, all of them: never half from one and half from
    another.

    Raises:
        InputError: ``inferscale`` is no mapping.
    """
    config = var_child_runnable_config.get() or {}
    return _filled(call, getattr(run_manager, "metadata", None), config.get("metadata"), config.get("configurable"))


def with_config(call: Mapping[str, Any], config: RunnableConfig | None) -> dict[str, Any]:
    """The keywords of a call, and what they leave open from the config that it was given.

    LangChain keeps a call's own config from the model: of an ``invoke`` only the metadata arrives, of a ``stream``
    nothing.

    Raises:
        InputError: as ``with_context``.
    """
    given = config or {}
    return _filled(call, given.get("metadata"), given.get("configurable"))


def _filled(call: Mapping[str, Any], *places: Mapping[str, Any] | None) -> dict[str, Any]:
    told = dict(call)
    for place in places:
        found = _told(place or {})
        if any(told.get(name) is not None for name in OWNERS):
            found = {name: value for name, value in found.items() if name not in OWNERS}
        told.update((name, value) for name, value in found.items() if told.get(name) is None)
    return told


def _told(place: Mapping[str, Any]) -> dict[str, Any]:
    ours = place.get(KEY)
    if ours is None:
        return {name: place[name] for name in PLAIN if place.get(name) is not None}
    if not isinstance(ours, Mapping):
        raise InputError(f"config holds {KEY}={ours!r}; give a mapping with memories, scope, user_id, …")
    unknown = sorted(str(name) for name in ours if name not in (*OWNERS, "memories"))
    if unknown:
        raise InputError(f"config's {KEY!r} has no {unknown[0]!r}; it takes memories, {', '.join(OWNERS)}.")
    return {name: value for name, value in ours.items() if value is not None}
