"""Mem0 vector store provider "inferscale": Mem0's Qdrant store, searched in memory where this process owns it.

What is stored, and how, is Mem0's: the same folder or server can be opened by Mem0's own class. Results, their order
and their scores are Mem0's too, up to the rounding of float32; only the time differs, because embedded Qdrant looks
at every point of every owner for each search.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from mem0.configs.vector_stores.qdrant import QdrantConfig
from mem0.vector_stores.qdrant import Qdrant
from pydantic import Field, model_validator
from qdrant_client.local.utils import normalize_point_id
from qdrant_client.models import Distance, ScoredPoint, VectorParams

from inferscale_mem.adapters.mem0.filters import Wanted
from inferscale_mem.adapters.mem0.qdrant import points, serialised
from inferscale_mem.adapters.mem0.resident import ResidentRows, RowId, weights
from inferscale_mem.errors import ConfigError, InputError

TELEMETRY = "mem0migrations"
"""Name of the collection that Mem0 keeps for its telemetry."""


class ResidentQdrantConfig(QdrantConfig):  # type: ignore[misc]  # Mem0 ships no types
    """Mem0's settings for Qdrant, and ``device``. A server may be given by ``url`` alone."""

    embedding_model_dims: int | None = Field(None, description="Dimensions; by default those of the embedder")
    path: str | None = Field(None, description="Folder of embedded Qdrant")
    device: str | None = Field(None, description="torch device that holds the embeddings; by default host memory")

    @model_validator(mode="before")
    @classmethod
    def check_host_port_or_path(cls, values: dict[str, Any]) -> dict[str, Any]:
        """In place of Mem0's: one of path, url, client, host and port."""
        if not any(values.get(place) for place in ("path", "url", "client")) and not (
            values.get("host") and values.get("port")
        ):
            raise ValueError("Give 'path', 'url', or 'host' and 'port'.")
        if values.get("path") and values.get("collection_name") == TELEMETRY:
            # With telemetry on, Mem0 opens this one beside each memory's, and a folder can be opened once.
            return {**values, "path": f"{values['path']}-{TELEMETRY}"}
        return values


class ResidentQdrant(Qdrant):  # type: ignore[misc]  # Mem0 ships no types
    """Mem0's Qdrant store. Thread-safe.

    If it opens the folder itself (``path``), nobody else can write there, and search, keyword search and listing are
    answered from memory: rows are read once, when first needed, and again after each write. A server, or a client that
    an app hands in, may be written to by others: there Qdrant itself answers.

    Args:
        embedding_model_dims: None takes what an existing collection has, else what is inserted first.
        device: see ``ResidentQdrantConfig``.
        place: as Mem0's.

    Raises:
        ConfigError: the collection exists and its dimension is another one. Nothing was written.
    """

    def __init__(
        self, collection_name: str, embedding_model_dims: int | None = None, device: str | None = None, **place: Any
    ) -> None:
        self._device = device
        super().__init__(collection_name=collection_name, embedding_model_dims=embedding_model_dims, **place)
        try:
            self._begin()
            if embedding_model_dims not in (None, self.embedding_model_dims):
                raise ConfigError(
                    f"The collection {collection_name!r} holds embeddings of {self.embedding_model_dims} numbers, not "
                    f"{embedding_model_dims}. Leave out embedding_model_dims, or use a new collection_name."
                )
        except BaseException:
            if place.get("client") is None:
                self.client.close()
            raise

    @classmethod
    def over(cls, store: Qdrant, device: str | None = None) -> Self:
        """The same open store, from Mem0's class."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(store), _device=device)
        made._begin()
        return made

    def sibling(self, collection_name: str) -> Self:
        """Another collection in the same place, for vectors of the same length."""
        made = type(self).__new__(type(self))
        made.__dict__.update(vars(self), collection_name=collection_name)
        made.create_col(self.embedding_model_dims, self.on_disk)
        made._begin()
        return made

    def _begin(self) -> None:
        serialised(self)
        self._writing = threading.RLock()
        self._lock = threading.Lock()  # of the rows; a search need not wait until a write has reached the disk
        self._rows: ResidentRows | None = None
        self.resident = self.is_local
        if not self.exists:
            if not self.is_local:
                raise ConfigError("A new collection on a server needs vector_store.config.embedding_model_dims.")
            return
        params: Any = self.client.get_collection(self.collection_name).config.params.vectors
        if not isinstance(params, VectorParams):
            raise ConfigError(f"The collection {self.collection_name!r} was not made by Mem0; use another one.")
        self.embedding_model_dims = params.size
        self.resident = self.is_local and params.distance == Distance.COSINE

    @property
    def exists(self) -> bool:
        """Whether the collection has been made."""
        return bool(self.client.collection_exists(self.collection_name))

    # Written through to Qdrant, and read back: the rows in memory are what Qdrant says they are.

    def create_col(self, vector_size: int | None, on_disk: bool, distance: Distance = Distance.COSINE) -> None:
        """As Mem0's. Without a size, an absent collection waits for the first insert, which has one."""
        if vector_size is not None or self.exists:
            super().create_col(vector_size, on_disk, distance)

    def insert(self, vectors: Any, payloads: Any = None, ids: Any = None) -> None:
        """As Mem0's.

        Raises:
            ConfigError: the vectors are not of the collection's length. Nothing was written.
        """
        if not vectors:
            return
        with self._writing:
            check_dims(vectors, self.embedding_model_dims)
            if self.embedding_model_dims is None:
                check_dims(vectors, len(vectors[0]))
                self.create_col(len(vectors[0]), self.on_disk)
                self.embedding_model_dims = len(vectors[0])
            try:
                super().insert(vectors, payloads, ids)
            finally:
                self._reread(range(len(vectors)) if ids is None else ids)

    def update(self, vector_id: Any, vector: Any = None, payload: Any = None) -> None:
        """As Mem0's. Raises as ``insert``."""
        with self._writing:
            check_dims([] if vector is None else [vector], self.embedding_model_dims)
            try:
                super().update(vector_id, vector, payload)
            finally:
                self._reread([vector_id])

    def delete(self, vector_id: Any) -> None:
        """As Mem0's."""
        with self._writing:
            try:
                super().delete(vector_id)
            finally:
                self._reread([vector_id])

    def delete_col(self) -> None:
        """As Mem0's."""
        with self._writing:
            try:
                super().delete_col()
            finally:
                self._rows = None

    def reset(self) -> None:
        """As Mem0's."""
        with self._writing:
            try:
                if self.exists:
                    super().reset()
            finally:
                self._rows = None

    # Answered from memory.

    def search(self, query: str, vectors: Any, top_k: int = 5, filters: Any = None) -> builtins.list[ScoredPoint]:
        """As Mem0's.

        Raises:
            ConfigError: the vector is not of the collection's length.
            InputError: it holds NaN.
            ValueError: the filters cannot be read, as Mem0 has it.
        """
        if not self.resident:
            found: list[ScoredPoint] = super().search(query, vectors, top_k, filters)
            return found
        wanted = self._wanted(filters)
        check_dims([vectors], self.embedding_model_dims)
        if np.isnan(np.asarray(vectors, np.float32)).any():
            raise InputError("The query's embedding holds NaN; check the embedder.")
        rows = self._known()
        with self._lock:
            return rows.nearest(vectors, wanted, top_k)

    def search_batch(self, queries: Any, vectors_list: Any, top_k: int = 1, filters: Any = None) -> Any:
        """As Mem0's. Raises as ``search``."""
        if not self.resident:
            return super().search_batch(queries, vectors_list, top_k, filters)
        return [self.search(*pair, top_k, filters) for pair in zip(queries, vectors_list, strict=True)]

    def keyword_search(self, query: str, top_k: int = 5, filters: Any = None) -> builtins.list[ScoredPoint] | None:
        """As Mem0's: by BM25 where fastembed is installed, else None."""
        if not self.resident:
            found: list[ScoredPoint] | None = super().keyword_search(query, top_k, filters)
            return found
        sparse = self._encode_bm25(query) if self._has_bm25_slot else None
        if sparse is None:
            return None
        wanted, rows = self._wanted(filters), self._known()
        with self._lock:
            return rows.with_keywords(weights(sparse), wanted, top_k)

    def list(self, filters: Any = None, top_k: int = 100) -> Any:
        """As Mem0's: a page of rows, and the id of the next."""
        if not self.resident:
            return super().list(filters, top_k)
        wanted, rows = self._wanted(filters), self._known()
        with self._lock:
            return rows.listed(wanted, top_k)

    def rows(self) -> Iterator[tuple[RowId, dict[str, Any], Sequence[float] | None]]:
        """All rows: (id, payload, embedding)."""
        rows = self._known()
        with self._lock:
            every = builtins.list(rows.every())
        yield from every

    def get(self, vector_id: Any) -> Any:
        """As Mem0's."""
        return None if self.embedding_model_dims is None else super().get(vector_id)

    def _wanted(self, filters: Any) -> Wanted:
        return Wanted.of(self._create_filter(filters) if filters else None)

    def _known(self) -> ResidentRows:
        """The rows, read if they have not been."""
        rows = self._rows
        if rows is not None:
            return rows
        with self._writing:
            if self._rows is None:
                rows = ResidentRows(self._device)
                for point in points(self.client, self.collection_name) if self.exists else ():
                    rows.put(point)
                self._rows = rows
            return self._rows

    def _reread(self, ids: Iterable[Any]) -> None:
        """These rows have been written, or some of them."""
        rows, written = self._rows, builtins.list(ids)
        if rows is None:
            return
        found = self.client.retrieve(self.collection_name, written, with_payload=True, with_vectors=True)
        with self._lock:
            for row_id in {normalize_point_id(row_id) for row_id in written} - {point.id for point in found}:
                rows.remove(row_id)
            for point in found:
                rows.put(point)


def resident(store: Any) -> Any:
    """The same Mem0 vector store, searched in memory if that is embedded Qdrant which it has opened itself."""
    if type(store) is Qdrant and store.is_local:
        return ResidentQdrant.over(store)
    return serialised(store)


def check_dims(vectors: Sequence[Sequence[float]], expected: object) -> None:
    """Raise ConfigError unless all vectors have the length that a collection was made for (if that is known)."""
    for vector in vectors:
        if isinstance(expected, int) and len(vector) != expected:
            raise ConfigError(
                f"The embedder gives {len(vector)} numbers per text, the collection was made for {expected}. Set "
                f"vector_store.config.embedding_model_dims={len(vector)} and use a new collection_name."
            )
