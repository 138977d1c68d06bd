"""Embedded Qdrant made safe: one call at a time, and a clear error when another process holds the folder.

Embedded Qdrant has no locks of its own: with eight threads adding and searching, adds were lost.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from qdrant_client import QdrantClient
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.models import Record

from inferscale_mem.errors import StoreLockedError

logger = logging.getLogger(__name__)

PAGE = 1000
"""Points per scroll request to a server."""

EMBEDDED_PAGE = 10_000
"""Points per scroll request to embedded Qdrant."""


class SerialClient(QdrantClient):
    """An embedded Qdrant client whose public methods run one at a time, whoever calls them.

    Mem0 shares one client between its collections of memories and of entities, so the lock has to be here.
    """

    def __init__(self, inner: QdrantClient) -> None:
        self._inner = inner
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> SerialClient:
        # Mem0 deep-copies its configuration, client included; a copy would be a second database.
        return self

    def __del__(self) -> None:
        """Nothing: the client inside closes itself when it goes."""

    def create_payload_index(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing: embedded Qdrant has no payload indexes, and warns when asked for one."""


def _one_at_a_time(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(QdrantClient, name))
    def call(self: SerialClient, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return getattr(self._inner, name)(*args, **kwargs)

    return call


for _name, _member in vars(QdrantClient).items():
    if callable(_member) and not _name.startswith("_") and _name not in vars(SerialClient):
        setattr(SerialClient, _name, _one_at_a_time(_name))


def embedded_inside(client: object) -> QdrantLocal | None:
    """Qdrant itself, if this client runs it in this process; None for a connection to a server."""
    if isinstance(client, SerialClient):
        client = client._inner
    local = client._client if isinstance(client, QdrantClient) else None
    return local if isinstance(local, QdrantLocal) else None


def is_embedded(client: object) -> TypeGuard[QdrantClient]:
    """Whether this client is Qdrant in this process, not a connection to a server."""
    return embedded_inside(client) is not None


def serialised(store: Any) -> Any:
    """The same Mem0 vector store; if it is embedded Qdrant, safe under threads from now on."""
    client = getattr(store, "client", None)
    if is_embedded(client) and not isinstance(client, SerialClient):
        store.client = SerialClient(client)
    return store


def points(client: QdrantClient, collection: str) -> Iterator[Record]:
    """Every point of a collection. If that takes more than a second, how far it has come is logged each second."""
    # Embedded Qdrant sorts all its points for every page, and holds them in this process anyway.
    page = EMBEDDED_PAGE if is_embedded(client) else PAGE
    done, said, offset = 0, time.monotonic(), None
    while True:
        found, offset = client.scroll(collection, limit=page, offset=offset, with_payload=True, with_vectors=True)
        yield from found
        done += len(found)
        if time.monotonic() - said > 1:
            said = time.monotonic()
            logger.info("Reading collection %s: %d of %d points", collection, done, client.count(collection).count)
        if offset is None:
            return


def locked(error: RuntimeError, config: Any) -> StoreLockedError | None:
    """The named error, if this one says that another client holds the folder of this store; None for any other."""
    if "already accessed" not in str(error):
        return None
    path = Path(str(config.vector_store.config.path)).absolute()
    return StoreLockedError(
        f"The memory store in {path} is in use: by another process, or by a memory in this one that was not closed. "
        "Close that one, set another home (INFERSCALE_HOME), or give the URL of a Qdrant server."
    )
