"""What can go wrong while a memory is opened, in words that say what to do."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mem0.configs.base import MemoryConfig
from qdrant_client.http.exceptions import ApiException

from inferscale_mem.adapters.mem0.qdrant import locked
from inferscale_mem.errors import ConfigError, InferScaleError, StoreError
from inferscale_mem.private_files import make_private_folder
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
        make_private_folder(path)
    except OSError as error:
        raise ConfigError(
            f"The folder {path} for {what} cannot be made ({error.strerror}). Make its parent writable, or set another."
        ) from error


def explained(error: Exception, config: Any, home: Path) -> InferScaleError | None:
    """The named error behind one that came up while a memory was opened; None for any other."""
    if isinstance(error, InferScaleError):
        return None
    if isinstance(error, RuntimeError) and (named := locked(error, config)):
        return named
    place = config.vector_store.config
    if isinstance(error, sqlite3.Error):
        return _of_sqlite(error, config, home)
    if isinstance(error, ValueError | LookupError | TypeError | AttributeError) and (damaged := _damaged_list(place)):
        return StoreError(
            f"{damaged} cannot be read ({error}): it lists Qdrant's collections, and is damaged. The facts are in the "
            "folder collection beside it. Restore it from a backup, or take the one that a new memory with the same "
            "embedder makes in another home; to begin without any facts, move the whole folder out of the way."
        )
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


def _of_sqlite(error: sqlite3.Error, config: Any, home: Path) -> StoreError:
    """SQLite does not say which file it means: the first that it cannot read, or write."""
    files = list(_sqlite_files(config, home))
    for usable in (_unreadable, _unwritable):
        for path, what, advice in files:
            if why := usable(path):
                return StoreError(f"The {what} in {path} cannot be opened ({why}). {advice}")
    listed = ", ".join(str(path) for path, _, _ in files)
    return StoreError(
        f"SQLite cannot use a file of this memory ({error}). See to it that there is room, and that these can be "
        f"written: {listed}."
    )


def _sqlite_files(config: Any, home: Path) -> Iterator[tuple[Path, str, str]]:
    """(file, what is in it, what to do if it cannot be used)."""
    if config.history_db_path != ":memory:":
        advice = "Set history_db_path to a file that can be written, or move that one out of the way."
        yield Path(config.history_db_path), "history", advice
    move = "Restore it from a backup, or move it out of the way: a new one is made, and no fact is in it."
    for path in sorted(home.glob("turns-*.db")):
        yield path, "latest turns of conversations", move
    for path in sorted(home.glob("owed-*.db")):
        yield path, "list of records that a server still has to drop", move
    if folder := getattr(config.vector_store.config, "path", None):
        advice = (
            "Restore it from a backup, or have the sqlite3 program save what it can (.recover). To begin without any "
            f"facts, move the folder {folder} out of the way."
        )
        for path in sorted(Path(folder).glob("collection/*/storage.sqlite")):
            yield path, "Qdrant collection", advice


def _unreadable(path: Path) -> str | None:
    """Why SQLite cannot read this file; None if it can, or if there is none."""
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (said,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return str(error)
    return None if said == "ok" else f"it is damaged: {said}"


def _unwritable(path: Path) -> str | None:
    if not os.access(path.parent, os.W_OK):  # SQLite makes files beside it
        return f"its folder {path.parent} cannot be written"
    return "it cannot be written" if path.exists() and not os.access(path, os.W_OK) else None


def _damaged_list(place: Any) -> Path | None:
    """The file in which embedded Qdrant lists its collections, if it is damaged."""
    path = Path(str(getattr(place, "path", None) or "")) / "meta.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        return path
    whole = isinstance(listed, dict) and isinstance(listed.get("collections"), dict) and "aliases" in listed
    return None if whole else path


def _check_keys(prefix: str, given: Mapping[Any, Any], taken: Iterable[str], listed: Iterable[str]) -> None:
    unknown = sorted(str(key) for key in given if key not in taken)
    if unknown:
        names = ", ".join(prefix + name for name in sorted(listed))
        raise ConfigError(f"Unknown key {prefix}{unknown[0]} in the configuration; known are: {names}.")
