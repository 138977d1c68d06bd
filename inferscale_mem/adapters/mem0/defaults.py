"""What a memory is made of when the app does not say: our LLM and embedder, embedded Qdrant, all under ``home``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mem0.configs.base import MemoryConfig
from mem0.configs.vector_stores.qdrant import QdrantConfig
from mem0.embeddings.configs import EmbedderConfig
from mem0.llms.configs import LlmConfig
from mem0.utils.factory import EmbedderFactory, LlmFactory, VectorStoreFactory
from mem0.vector_stores.configs import VectorStoreConfig
from qdrant_client import QdrantClient

from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.adapters.mem0.llm import EngineLLM, EngineLLMConfig
from inferscale_mem.adapters.mem0.opening import make_folder
from inferscale_mem.adapters.mem0.resident_qdrant import ResidentQdrant, ResidentQdrantConfig
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError
from inferscale_mem.models import resolve_embedder
from inferscale_mem.private_files import make_private_file

PROVIDER = "inferscale"
COLLECTION = "mem0"

_PLACES = ("path", "host", "url", "client")


def register() -> None:
    """Make LLM, embedder and vector store known to Mem0's factories under our name."""
    LlmFactory.register_provider(PROVIDER, f"{EngineLLM.__module__}.{EngineLLM.__name__}", EngineLLMConfig)
    EmbedderFactory.provider_to_class[PROVIDER] = f"{LocalEmbedder.__module__}.{LocalEmbedder.__name__}"
    VectorStoreFactory.provider_to_class[PROVIDER] = f"{ResidentQdrant.__module__}.{ResidentQdrant.__name__}"


def complete(given: MemoryConfig | None, settings: InferScaleConfig) -> MemoryConfig:
    """The app's Mem0 settings, with what it left out filled in. Nothing the app set is changed."""
    known = {} if given is None else _set(given)
    embedder = known.get("embedder") or _construct(EmbedderConfig, {})
    if embedder.provider == PROVIDER:
        embedder = _construct(EmbedderConfig, {"model": resolve_embedder(settings), **(embedder.config or {})})
    known["embedder"] = embedder
    known.setdefault("llm", _construct(LlmConfig, {}))
    known.setdefault("history_db_path", str(settings.home / "history.db"))
    known["vector_store"] = _vector_store(known.get("vector_store"), embedder, settings)
    for what, path in _folders(known):
        make_folder(path, what)
    if Path(known["history_db_path"]).is_dir():
        raise ConfigError(f"history_db_path={known['history_db_path']!r} is a folder; name a file in it.")
    if known["history_db_path"] != ":memory:":
        with contextlib.suppress(OSError):  # SQLite finds the same, and then it is said what to do
            make_private_file(Path(known["history_db_path"]))
    return (given or MemoryConfig()).model_copy(update=known)


def read(config: Mapping[str, Any], settings: InferScaleConfig) -> MemoryConfig:
    """Mem0's own reading of a configuration dict, which also knows our providers and keeps Qdrant out of /tmp.

    Raises:
        pydantic.ValidationError: as Mem0 raises it.
    """
    known = dict(config)
    for name, kind in (("llm", LlmConfig), ("embedder", EmbedderConfig)):
        section = known.get(name)
        if isinstance(section, Mapping) and section.get("provider", PROVIDER) == PROVIDER:
            known[name] = _construct(kind, dict(section.get("config") or {}))
    store = known.get("vector_store")
    if isinstance(store, Mapping):
        inner = dict(store.get("config") or {})
        provider = store.get("provider", "qdrant")
        if provider in ("qdrant", PROVIDER) and not any(inner.get(place) for place in _PLACES):
            inner["path"] = str(settings.home / "qdrant")
        if provider == PROVIDER:
            ours = _construct(VectorStoreConfig, ResidentQdrantConfig(**inner))
            del known["vector_store"]  # Mem0's validator runs over this one even when it is made already
            return MemoryConfig(**known).model_copy(update={"vector_store": ours})
        known["vector_store"] = {**store, "config": inner}  # copied: Mem0 writes into the dict it is given
    return MemoryConfig(**known)


def store_name(config: MemoryConfig) -> str:
    """Name of the store in handles' tags: the same wherever the folder is moved, and whichever class opens it."""
    provider = config.vector_store.provider
    kind = "qdrant" if provider == PROVIDER else provider
    return f"{kind}/{getattr(config.vector_store.config, 'collection_name', COLLECTION)}"


def declared_dims(embedder: Any) -> int | None:
    """How long an embedder says its embeddings are."""
    dims = getattr(getattr(embedder, "config", None), "embedding_dims", None)
    return dims if isinstance(dims, int) else None


def fit_dims(embedder: Any, store: Any, config: MemoryConfig) -> None:
    """Have the collection take what the embedder gives, before anything is written.

    Where the app named no dimension, Mem0 has just made the collection for 1536; an empty one is made again.

    Raises:
        ConfigError: they differ, and the collection holds something or its dimension was asked for.
    """
    gives, takes = declared_dims(embedder), getattr(store, "embedding_model_dims", None)
    if isinstance(store, ResidentQdrant) and takes is None:
        return  # an absent collection is made by the first insert, for what that brings
    qdrant = isinstance(getattr(store, "client", None), QdrantClient)
    if qdrant:
        vectors = store.client.get_collection(store.collection_name).config.params.vectors
        # What an existing collection takes is not what Mem0 was told.
        takes = store.embedding_model_dims = getattr(vectors, "size", None)
    if gives is None or not isinstance(takes, int) or gives == takes:
        return
    asked = "embedding_model_dims" in config.vector_store.config.model_fields_set
    if qdrant and not asked and store.client.count(store.collection_name).count == 0:
        store.embedding_model_dims = gives
        store.delete_col()
        store.create_col(gives, store.on_disk)
        return
    raise ConfigError(
        f"The embedder gives {gives} numbers per text, the collection {store.collection_name!r} takes {takes}. Use the "
        f"embedder it was made with, or a new vector_store.config.collection_name with embedding_model_dims={gives}."
    )


def _set(given: MemoryConfig) -> dict[str, Any]:
    """The sections that the app passed, or changed afterwards."""
    sections: dict[str, Any] = {name: getattr(given, name) for name in MemoryConfig.model_fields}
    return {
        name: section
        for name, section in sections.items()
        if name in given.model_fields_set or _plain(section) != _plain(getattr(MemoryConfig(), name))
    }


def _plain(section: Any) -> Any:
    return section.model_dump(warnings=False) if hasattr(section, "model_dump") else section


def _construct(kind: Any, config: Any) -> Any:
    # Mem0's settings refuse providers they do not know; their factories do not. So: made without validation.
    return kind.model_construct(provider=PROVIDER, config=config)


def _vector_store(given: VectorStoreConfig | None, embedder: EmbedderConfig, settings: InferScaleConfig) -> Any:
    dims = _dims_before(embedder)
    if given is None:
        config = {"collection_name": COLLECTION, "path": str(settings.home / "qdrant")}
        given = VectorStoreConfig(provider="qdrant", config=config)
    inner = given.config
    fields = getattr(type(inner), "model_fields", {})
    if dims is None or "embedding_model_dims" not in fields or "embedding_model_dims" in inner.model_fields_set:
        return given
    return given.model_copy(update={"config": inner.model_copy(update={"embedding_model_dims": dims})})


def _dims_before(embedder: EmbedderConfig) -> int | None:
    """An embedder's dimension as far as its settings tell; ours tells without being loaded."""
    config = dict(embedder.config or {})
    if embedder.provider == PROVIDER:
        return int(EmbedderFactory.create(PROVIDER, config, None).dims)
    dims = config.get("embedding_dims")
    return dims if isinstance(dims, int) else None


def _folders(known: Mapping[str, Any]) -> list[tuple[str, Path]]:
    folders = []
    if known["history_db_path"] != ":memory:":
        folders.append(("the history (history_db_path)", Path(known["history_db_path"]).expanduser().parent))
    store = known["vector_store"].config
    if isinstance(store, QdrantConfig) and store.path and not (store.url or store.host or store.client):
        folders.append(("Qdrant (vector_store.config.path)", Path(store.path).parent))
    return folders
