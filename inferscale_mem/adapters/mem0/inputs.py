"""What callers give, checked and cleaned before anything is stored."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from pydantic_core import PydanticSerializationError, to_jsonable_python

from inferscale_mem import handles
from inferscale_mem.adapters.mem0.errors import MessagesError, MissingOwnerError
from inferscale_mem.errors import FactError, InputError, ScopeError
from inferscale_mem.types import OWNER_FIELDS, Scope

_BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s+")

Messages = list[dict[str, Any]]


def owner_scope(owners: Mapping[str, Any] | None, where: str) -> Scope:
    """The scope that these ids name, read as Mem0 reads them: numbers as text, outer spaces dropped.

    Args:
        owners: user_id, agent_id, run_id; anything else in it is ignored.
        where: what to call their place in an error message.

    Raises:
        MissingOwnerError: none is given.
        ScopeError: one is blank, a wildcard, no text or number, or has spaces inside.
    """
    if not any(owners and owners.get(name) is not None for name in OWNER_FIELDS):
        raise MissingOwnerError(f"At least one of user_id, agent_id, run_id must be given {where}.")
    scope = Scope.of(owners or {})
    for name, value in scope.owners.items():
        if any(char.isspace() for char in value):
            raise ScopeError(f"{name}={value!r} has spaces inside; give an id without spaces.")
        check_unicode(value, name)
    return scope


def row_id(memory_id: object, *, uuids: bool) -> Any:
    """The id of a fact as its row, its history and its handle have it.

    Args:
        memory_id: as the caller has it.
        uuids: whether the store takes other spellings of a UUID for the same row, as Qdrant does.

    Raises:
        InputError: it is none.
    """
    if isinstance(memory_id, bool) or not isinstance(memory_id, str | int | UUID) or not str(memory_id).strip():
        raise InputError(f"memory_id={memory_id!r} is no id; give the 'id' of a memory that search or get_all lists.")
    if uuids and isinstance(memory_id, str):
        with contextlib.suppress(ValueError):
            return str(UUID(memory_id))
    return str(memory_id) if isinstance(memory_id, UUID) else memory_id


def check_unicode(text: str, what: str) -> None:
    """Raise InputError if the text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The {what} has lone surrogates, which cannot be stored; decode it as UTF-8.") from error


def fact_text(text: object) -> str:
    """A fact's new text as it may be stored: handles in it removed.

    Raises:
        FactError: not a string, nothing in it, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise FactError(f"A memory is text, not {type(text).__name__}; convert it to a string.")
    clean = _without_handles(text, "memory")
    if not clean.strip():
        raise FactError("The memory is empty; give the text to remember.")
    return clean


def clean_messages(messages: object) -> Messages:
    """What ``add`` was given as a list of messages that may be stored.

    Handles are removed: they are recalled memories, not news. Messages without any text left are left out, so the list
    may come back empty: when all there was to store was handles, or when it was empty before.

    Raises:
        MessagesError: neither a string, a message, nor a list of messages.
        FactError: no text at all, or not valid Unicode.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, Mapping):
        messages = [messages]
    elif not isinstance(messages, list | tuple):
        raise MessagesError(f"messages must be str, dict, or list[dict], not {type(messages).__name__}.")
    cleaned = [_clean(message) for message in messages]
    kept = [message for message, blank in zip(cleaned, map(_is_blank, cleaned), strict=True) if not blank]
    if messages and not kept and all(map(_is_blank, messages)):
        raise FactError("The messages hold no text; give the text to remember.")
    return kept


def without_recalled(messages: Messages, known: Callable[[], Iterable[str]]) -> Messages:
    """The messages without those lines of system messages that are facts already (an app put them there).

    Args:
        messages: as ``clean_messages`` returns them.
        known: texts of the owner's facts; only called if there is a system message.
    """
    if not any(message.get("role") == "system" for message in messages):
        return messages
    texts = {_normal(text) for text in known()}
    kept = []
    for message in messages:
        if message.get("role") == "system" and isinstance(message.get("content"), str):
            lines = [line for line in message["content"].splitlines() if _normal(line) not in texts]
            message = {**message, "content": "\n".join(lines)}
        if not _is_blank(message):
            kept.append(message)
    return kept


def raw_facts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that Mem0 stores with ``infer=False``: one per message that is no system message."""
    facts = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" or content is None:
            continue
        facts.append(content if isinstance(content, str) else " ".join(_texts(content)))
    return facts


READ_AS_TEXT = ("actor_id", "created_at", "data", "hash", "role", "text_lemmatized", "updated_at")
"""Keys of a row's payload that are Mem0's own. With another kind of value, none of the owner's facts could be read."""


def check_metadata(metadata: object) -> Mapping[str, Any]:
    """The metadata; InputError unless this is None, or a mapping with text keys that can be written as JSON."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise InputError(f"metadata must be a dict with text keys, not {type(metadata).__name__}.")
    for key, value in metadata.items():
        if key in READ_AS_TEXT and value is not None and not isinstance(value, str):
            raise InputError(f"metadata[{key!r}] is read by Mem0 as text, not {type(value).__name__}; rename the key.")
        try:
            text = json.dumps(to_jsonable_python(value), ensure_ascii=False)  # as the store will write it
        except (PydanticSerializationError, ValueError, TypeError) as error:
            raise InputError(f"metadata[{key!r}] cannot be stored ({error}); use text, numbers and lists.") from error
        check_unicode(key + text, "metadata")
    return metadata


def _clean(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessagesError(f"A message is a dict with role and content, not {type(message).__name__}.")
    if not isinstance(message.get("role"), str):
        raise MessagesError("A message has no role; give 'user', 'assistant' or 'system'.", {"keys": list(message)})
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _without_handles(content, "message")}
    if isinstance(content, list):
        return {**message, "content": [_clean_block(block) for block in content]}
    if content is None or isinstance(content, Mapping):
        return dict(message)
    raise MessagesError(f"A message's content is text or a list of blocks, not {type(content).__name__}.")


def _clean_block(block: object) -> object:
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return {**block, "text": _without_handles(block["text"], "message")}
    return block


def _without_handles(text: str, what: str) -> str:
    try:
        check_unicode(text, what)
    except InputError as error:
        raise FactError(str(error)) from error
    return handles.strip(text) if handles.find(text) else text


def _is_blank(message: Mapping[str, Any]) -> bool:
    """Whether a message has text in it that is all blank; one without text (a tool call, an image) is not blank."""
    content = message.get("content")
    if isinstance(content, str):
        return not content.strip()
    return isinstance(content, list) and bool(_texts(content)) and not "".join(_texts(content)).strip()


def _texts(content: object) -> list[str]:
    blocks = content if isinstance(content, list) else []
    return [str(block["text"]) for block in blocks if isinstance(block, Mapping) and block.get("type") == "text"]


def _normal(line: str) -> str:
    return " ".join(_BULLET.sub("", line).casefold().split())
