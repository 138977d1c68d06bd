"""What can go wrong while a memory is opened, in words that say what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mem0.configs.base import MemoryConfig
from qdrant_client.http.exceptions import ApiException

from inferscale_mem.adapters.mem0.qdrant import locked
from inferscale_mem.errors import ConfigError, InferScaleError, StoreError
from inferscale_mem.protocols import Engine

FORMER = frozenset(
    {"graph_store", "enable_graph", "custom_prompt", "custom_fact_extraction_prompt", "custom_update_memory_prompt"}
)
"""Keys that Mem0 once had, and still takes without a word."""

_SECTIONS = ("vector_store", "llm", "embedder", "reranker")


def check_dict(config: object) -> dict[str, Any]:
    """Mem0's configuration as ``from_config`` was given it: a copy.

    Raises:
        ConfigError: no mapping, or a key that nobody reads.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"The configuration must be a dict, not {type(config).__name__}; {{}} takes all defaults.")
    known = {*MemoryConfig.model_fields, "inferscale"}
    _check_keys("", config, known | FORMER, known)
    for name in _SECTIONS:
        section = config.get(name)
        if not isinstance(section, Mapping):
            continue  # Mem0 says what it thinks of that
        _check_keys(f"{name}.", section, {"provider", "config"}, {"provider", "config"})
        if not isinstance(section.get("config"), Mapping | None):
            raise ConfigError(f"{name}.config must be a dict, not {type(section['config']).__name__}.")
    return {name: value for name, value in config.items() if name not in FORMER}


def check_objects(config: object, engine: object) -> None:
    """Raise ConfigError unless these can be a configuration and an engine. Mem0 looks at attributes only."""
    if config is not None and not hasattr(config, "vector_store"):
        raise ConfigError(
            f"The configuration must be a mem0 MemoryConfig, not {type(config).__name__}; from_config takes a dict."
        )
    if engine is not None and not isinstance(engine, Engine):
        raise ConfigError(f"engine must be an engine of this package, not {type(engine).__name__}.")


def make_folder(path: Path, what: str) -> None:
    """Make a folder that only its owner can read.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder {path} for {what} cannot be made ({error.strerror}). Make its parent writable, or set another."
        ) from error


def explained(error: Exception, config: Any) -> InferScaleError | None:
    """The named error behind one that came up while a memory was opened; None for any other."""
    if isinstance(error, RuntimeError) and (named := locked(error, config)):
        return named
    if isinstance(error, sqlite3.Error):
        return StoreError(
            f"The history in {config.history_db_path} cannot be opened ({error}). Set history_db_path to a file that "
            "can be written, or move that one out of the way."
        )
    place = config.vector_store.config
    if isinstance(error, ApiException):
        where = getattr(place, "url", None) or f"{getattr(place, 'host', None)}:{getattr(place, 'port', None)}"
        return StoreError(
            f"The Qdrant server at {where} does not answer as it should ({error}). Start it, or set another url in "
            "vector_store.config; with path instead, Qdrant runs in this process."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return StoreError(
            f"{error.filename} cannot be used ({error.strerror}). Set another path in vector_store.config, or another "
            "home (INFERSCALE_HOME)."
        )
    return None


def _check_keys(prefix: str, given: Mapping[Any, Any], taken: Iterable[str], listed: Iterable[str]) -> None:
    unknown = sorted(str(key) for key in given if key not in taken)
    if unknown:
        names = ", ".join(prefix + name for name in sorted(listed))
        raise ConfigError(f"Unknown key {prefix}{unknown[0]} in the configuration; known are: {names}.")
