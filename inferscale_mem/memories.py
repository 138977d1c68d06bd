"""The memories a caller gives a request, in every form that a search gives them: read into handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_mem import handles
from inferscale_mem.errors import HandleError, InputError


def read_memories(memories: Any, name: str = "memories=") -> tuple[str, ...]:
    """Handles out of a search's answer, or a list of its results, a store's items, a retriever's documents or handles.

    Args:
        memories: one of these; None stands for none.
        name: what the caller calls them, for errors.

    Raises:
        HandleError: something in it is no handle. InputError: not a list at all.
    """
    if memories is None:
        return ()
    if isinstance(memories, Mapping):
        if "results" not in memories:
            raise InputError(f"{name} got a mapping without 'results'; give what search() returned.")
        memories = memories["results"]
    if isinstance(memories, str) or not isinstance(memories, Sequence):
        raise InputError(f"{name} takes a search's answer or a list of handles, not {type(memories).__name__}.")
    return tuple(_handle(item, name) for item in memories)


def _handle(item: Any, name: str) -> str:
    if isinstance(item, Mapping):
        text = item.get("memory")
    else:  # a store's item, a retriever's document, or a handle
        text = getattr(item, "handle", getattr(item, "page_content", item))
    if text is None and hasattr(item, "namespace"):
        raise HandleError(
            f"{name} holds the item {_short(getattr(item, 'key', None))}, which was put with index=False, so it "
            "has no handle; leave it out (its hit's handle is None), or put it without index=False."
        )
    try:
        handles.split(text if isinstance(text, str) else "")
    except HandleError as error:
        raise HandleError(
            f"{name} holds {_short(text)}, which is no handle; give what search() or a retriever returns by "
            "default (memory_format='text' gives text, which belongs into a message)."
        ) from error
    return str(text)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
