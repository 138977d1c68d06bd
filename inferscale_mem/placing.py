"""Where handles stand in messages, which of them ask for something, and where the memory block goes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from inferscale_mem import memory_block
from inferscale_mem.chat_template import Chat, new_mark
from inferscale_mem.handles import UNKNOWN, find, find_broken, strip_given
from inferscale_mem.tool_template import Tools
from inferscale_mem.types import Fact, Miss

DEFAULT_SYSTEM = "You are a helpful assistant."
"""What a request with memories and no system message says to the model."""

HEADING = "Memories:\n"
"""Stands over the memory block where no handle in a system message marks its place."""

ELSEWHERE = "stands in {}; handles are read from system messages and memories= only"

BROKEN = "is not a whole handle: cut off, changed, or glued to letters; set handles apart by spaces or line breaks"

SYSTEM = ("system",)
"""Roles of messages whose handles ask for something, unless the app says otherwise."""

_KEPT = ("role", "content", "tool_call_id", "id", "type")
"""Fields of messages, and of calls in them, that are dealt with elsewhere, or hold nothing that a model reads."""


def handles_of(chat: Chat, roles: Sequence[str]) -> list[str]:
    """Handles in the content of messages of these roles, in order."""
    return [found.handle for message in chat if message["role"] in roles for found in find(message["content"])]


def handles_anywhere(chat: Chat) -> Iterator[str]:
    """Handles in all that a template may write of the messages, in order."""
    yield from (found.handle for message in chat for text in _texts_of(message) for found in find(text))


def _texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    return _within({name: value for name, value in message.items() if name != "role"})


def _within(value: Any) -> Iterator[str]:
    """All texts in a value, in order, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _within(name)
            yield from _within(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _within(inner)


def handles_of_tools(tools: Tools | None) -> list[str]:
    """Handles in the definitions of tools, in order."""
    return [found.handle for text in _within(tools or ()) for found in find(text)]


def all_missed(
    chat: Chat,
    facts: Mapping[str, Fact],
    known: Sequence[Miss],
    asked: Sequence[str],
    roles: Sequence[str],
    tools: Tools | None = None,
) -> tuple[Miss, ...]:
    """Every handle that is given and not served, once, broken ones too: a request whose memories do nothing must not be
    silent."""
    missed = {miss.handle: miss for miss in known}
    for handle in [*handles_of(chat, roles), *asked]:
        missed.setdefault(handle, Miss(handle, UNKNOWN))
    for message in chat:
        for handle in handles_anywhere([message]):
            missed.setdefault(handle, Miss(handle, ELSEWHERE.format(f"a message of the {message['role']}")))
    for handle in handles_of_tools(tools):
        missed.setdefault(handle, Miss(handle, ELSEWHERE.format("a tool's definition")))
    for text in (*(text for message in chat for text in _texts_of(message)), *_within(tools or ())):
        for handle in find_broken(text):
            missed.setdefault(handle, Miss(handle, BROKEN))
    return tuple(miss for handle, miss in missed.items() if handle not in facts)


# Cutting handles out, and marking the block's place.


def marked(chat: Chat, handles: Iterable[str], mark: str) -> Chat:
    """The messages with ``mark`` at the memory block's place and without ``handles``."""
    valid = set(handles)
    found: Chat = []
    placed = False
    for message in chat:
        text, here = _cut(message["content"], valid, "" if placed or message["role"] != "system" else mark)
        placed = placed or here
        if text or not message["content"] or message["role"] != "system":
            found.append({**_rest_without(message, valid), "content": text})
    return found if placed else _appended(found, mark)


def without(chat: Chat, handles: Collection[str]) -> Chat:
    """The messages without ``handles``; system messages that were nothing else are left out."""
    if not handles:
        return chat
    valid = set(handles)
    cut = [{**_rest_without(message, valid), "content": _cut(message["content"], valid, "")[0]} for message in chat]
    return [new for new, old in zip(cut, chat, strict=True) if new["content"] or not old["content"] or _speaks(old)]


def tools_without(tools: Tools | None, handles: Collection[str]) -> Tools | None:
    """The definitions without ``handles``."""
    valid = set(handles)
    return [_scrubbed(tool, valid) for tool in tools] if tools and valid else tools


def human_marks(chat: Chat) -> dict[int, str]:
    """A mark for each human message: its index among the messages -> the mark."""
    return {index: new_mark() for index, message in enumerate(chat) if message["role"] == "user"}


def before_humans(chat: Chat, handles: Collection[str], marks: Mapping[int, str]) -> Chat:
    """The messages with each mark in front of its human message and without ``handles``."""
    at = {id(message): index for index, message in enumerate(chat)}
    kept = [(at[id(message)], message) for message in chat if _speaks(message) or _remains(message, set(handles))]
    cut = [without([message], handles) or [{**message, "content": ""}] for _, message in kept]
    return [
        {**new[0], "content": marks.get(index, "") + new[0]["content"]}
        for (index, _), new in zip(kept, cut, strict=True)
    ]


def _remains(message: Mapping[str, Any], valid: set[str]) -> bool:
    return not message["content"] or bool(_cut(message["content"], valid, "")[0])


def _speaks(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] != "system")


def _rest_without(value: Mapping[str, Any], valid: set[str]) -> dict[str, Any]:
    """A message, or a call in it, whose other fields do not hold the handles either."""
    return {name: inner if name in _KEPT else _field_without(name, inner, valid) for name, inner in value.items()}


def _field_without(name: str, value: Any, valid: set[str]) -> Any:
    if name == "tool_calls" and isinstance(value, list | tuple):
        return [_rest_without(call, valid) if isinstance(call, Mapping) else _scrubbed(call, valid) for call in value]
    return _scrubbed(value, valid)


def _scrubbed(value: Any, valid: set[str]) -> Any:
    if isinstance(value, str):
        return strip_given(value, valid)
    if isinstance(value, Mapping):
        return {strip_given(str(name), valid): _scrubbed(inner, valid) for name, inner in value.items()}
    return [_scrubbed(inner, valid) for inner in value] if isinstance(value, list | tuple) else value


def _cut(text: str, valid: set[str], mark: str) -> tuple[str, bool]:
    """The text without valid handles, with the mark in their place; and whether the mark has been put."""
    found = find(text)
    spans = [(f.start, f.end) for f in found if f.handle in valid]
    others = [(f.start, f.end) for f in found if f.handle not in valid]
    if not spans:
        return text, False
    if not mark:
        return memory_block.remove(text, spans, others), False
    before, behind = memory_block.split(text, spans, others)
    return before + mark + behind, True


def _appended(chat: Chat, mark: str) -> Chat:
    """The messages with heading and mark at the end of the first system message."""
    first = next((i for i, message in enumerate(chat) if message["role"] == "system"), None)
    if first is None:
        return _appended([{"role": "system", "content": DEFAULT_SYSTEM}, *chat], mark)
    said = chat[first]["content"].rstrip()
    text = f"{said}\n\n{HEADING}{mark}" if said else HEADING + mark
    return [*chat[:first], {**chat[first], "content": text}, *chat[first + 1 :]]
