"""All rows of a vector store: what the index starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from qdrant_client import QdrantClient

from inferscale_mem.adapters.mem0.qdrant import points
from inferscale_mem.adapters.mem0.resident import parts
from inferscale_mem.adapters.mem0.resident_qdrant import ResidentQdrant

logger = logging.getLogger(__name__)

LIST_LIMIT = 10_000
"""Rows asked for from vector stores that cannot be scrolled."""

Row = tuple[str, dict[str, Any], Sequence[float] | None]
"""(id, payload, vector); None where the store does not give its vectors back."""


def rows(store: Any) -> Iterator[Row]:
    """Every row of a Mem0 vector store."""
    client = getattr(store, "client", None)
    if isinstance(store, ResidentQdrant) and store.resident:
        for row_id, payload, vector in store.rows():
            yield str(row_id), payload, vector
        return
    if isinstance(client, QdrantClient):
        for point in points(client, store.collection_name):
            yield str(point.id), dict(point.payload or {}), parts(point.vector)[0]
        return
    listed = list(store.list(top_k=LIST_LIMIT) or [])
    if listed and isinstance(listed[0], list | tuple):  # some stores return the rows, others a page that holds them
        listed = list(listed[0])
    if len(listed) >= LIST_LIMIT:
        logger.warning("Only the first %d facts of this vector store are known; older handles may miss.", LIST_LIMIT)
    for row in listed:
        yield str(row.id), dict(row.payload or {}), None
