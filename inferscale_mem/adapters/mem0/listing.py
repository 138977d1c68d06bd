"""All rows of a vector store: what the index starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from qdrant_client import QdrantClient

logger = logging.getLogger(__name__)

PAGE = 1000
"""Points per scroll request."""

LIST_LIMIT = 10_000
"""Rows asked for from vector stores that cannot be scrolled."""

Row = tuple[str, dict[str, Any], Sequence[float] | None]
"""(id, payload, vector); None where the store does not give its vectors back."""


def rows(store: Any) -> Iterator[Row]:
    """Every row of a Mem0 vector store."""
    client = getattr(store, "client", None)
    if isinstance(client, QdrantClient):
        yield from _scroll(client, store.collection_name)
        return
    listed = list(store.list(top_k=LIST_LIMIT) or [])
    if listed and isinstance(listed[0], list | tuple):  # some stores return the rows, others a page that holds them
        listed = list(listed[0])
    if len(listed) >= LIST_LIMIT:
        logger.warning("Only the first %d facts of this vector store are known; older handles may miss.", LIST_LIMIT)
    for row in listed:
        yield str(row.id), dict(row.payload or {}), None


def _scroll(client: QdrantClient, collection: str) -> Iterator[Row]:
    offset: Any = None
    while True:
        points, offset = client.scroll(collection, limit=PAGE, offset=offset, with_payload=True, with_vectors=True)
        for point in points:
            vector: Any = point.vector
            if isinstance(vector, dict):  # dense beside sparse; the dense one has no name
                vector = vector.get("")
            yield str(point.id), dict(point.payload or {}), vector
        if offset is None:
            return
