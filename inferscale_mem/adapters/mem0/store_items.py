"""What a LangGraph store does with a memory and apps may not: mark facts as its items, and move their end.

An item is a fact with marks in its metadata. They say whose namespace it is in, so only the store writes them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

from inferscale_mem.errors import InputError
from inferscale_mem.types import Fact

NAMESPACE, KEY, VALUE, CREATED, TTL, EXPIRES, INDEXED, KEPT_ONLY = MARKS = tuple(
    f"store_{name}" for name in ("namespace", "key", "value", "created_at", "ttl", "expires_at", "indexed", "kept_only")
)
"""Keys of an item's metadata. Nothing is an item without the first."""

_writing = contextvars.ContextVar("inferscale-mem0-items", default=False)


@contextlib.contextmanager
def writing(memory: Any) -> Iterator[None]:
    """Around what a store does to items: nobody else of this process writes any in this memory, and marks are let in.

    Args:
        memory: an InferScaleMemory.
    """
    with memory._core.items_lock:
        token = _writing.set(True)
        try:
            yield
        finally:
            _writing.reset(token)


def set_end(memory: Any, fact_id: str, at: float) -> bool:
    """Have an item expire at this time (Unix seconds); its fact, handles and record stay what they are.

    Returns:
        Whether there still is such a fact.
    """
    with memory._open_core():
        return bool(memory.vector_store.note(fact_id, {EXPIRES: at}))


def is_kept_only(metadata: Mapping[str, Any] | None) -> bool:
    """Whether this is an item that is kept and never read: no context of other facts, and no search hands it out."""
    return metadata is not None and NAMESPACE in metadata and metadata.get(KEPT_ONLY) is True


def check_add(metadata: Mapping[str, Any]) -> None:
    """Raise InputError if an app marks what it adds as an item."""
    if NAMESPACE in metadata and not _writing.get():
        raise InputError(f"metadata[{NAMESPACE!r}] marks items of an InferScaleStore; put them there, or rename it.")


def check_update(fact: Fact | None, text: str | None, metadata: Mapping[str, Any]) -> None:
    """Raise InputError if an app makes an item of a fact, or changes of an item what its store has to know."""
    check_add(metadata)
    if fact is None or not set(MARKS[:4]) <= set(fact.metadata) or _writing.get():
        return
    marks = sorted(set(MARKS) & set(metadata))
    if text is not None or marks:
        what = f"metadata[{marks[0]!r}]" if marks else "The text"
        raise InputError(
            f"{what} of this memory follows from the value that an InferScaleStore holds in namespace "
            f"{fact.metadata[NAMESPACE]} under key {fact.metadata[KEY]!r}; put the new value there."
        )
