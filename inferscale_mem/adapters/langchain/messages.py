"""LangChain messages as the dicts that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from inferscale_mem.errors import InputError
from inferscale_mem.handles import find

_TEXT = frozenset({"text", "text-plain"})
_REASONING = frozenset({"reasoning", "thinking"})
_IGNORED = frozenset({"non_standard"})
"""Blocks that carry a provider's own data, which no template knows."""
_CALLS = frozenset(
    {
        "tool_call",
        "tool_call_chunk",
        "tool_use",
        "function_call",
        "invalid_tool_call",
        "server_tool_call",
        "server_tool_call_chunk",
        "server_tool_result",
    }
)
"""Blocks of AI messages that repeat what ``tool_calls`` holds, or that another provider's server has dealt with."""


def to_template(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages as chat-template dicts: role and content as text, tool calls and their answers by id.

    Raises:
        InputError: no messages, a kind of message no template has a role for, or content that is not text.
    """
    if not messages:
        raise InputError("There are no messages; give at least one.")
    return [_convert(message) for message in messages]


def _convert(message: BaseMessage) -> dict[str, Any]:
    if isinstance(message, AIMessage):
        return _assistant(message)
    if isinstance(message, ToolMessage):
        converted = {"role": "tool", "content": _text(message), "tool_call_id": message.tool_call_id}
        return converted | ({"name": message.name} if message.name else {})
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": _text(message)}
    if isinstance(message, HumanMessage):
        return {"role": "user", "content": _text(message)} | ({"name": message.name} if message.name else {})
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": _text(message)}
    raise InputError(
        f"{type(message).__name__} has no place in a chat template; send system, human, AI and tool messages."
    )


def _assistant(message: AIMessage) -> dict[str, Any]:
    # The blocks of an answer are pieces of one text, so nothing comes between them.
    converted: dict[str, Any] = {"role": "assistant", "content": _text(message, glue="")}
    reasoning = message.additional_kwargs.get("reasoning_content") or _reasoning(message)
    if reasoning:
        converted["reasoning_content"] = reasoning
    calls: list[tuple[str | None, str, Any]]
    calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    calls += [(call["id"], call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    if calls:
        converted["tool_calls"] = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ]
    return converted


def _text(message: BaseMessage, glue: str = "\n") -> str:
    # A line break between blocks keeps a handle at the end of one from growing into the next.
    if isinstance(message.content, str):
        return message.content
    text = ""
    for part in (_block_text(block, message) for block in message.content):
        if part is not None:
            ends = find(text)[-1:]
            between = "\n" if ends and ends[0].end == len(text) else glue if text else ""
            text += between + part
    return text


def _block_text(block: str | Mapping[str, Any], message: BaseMessage) -> str | None:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in _TEXT and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind in _IGNORED or (isinstance(message, AIMessage) and kind in _CALLS | _REASONING):
        return None
    raise InputError(
        f"A message of type {message.type!r} holds a content block of type {kind!r}; the model reads text only. "
        "Remove it, or put what it says into a text block."
    )


def _reasoning(message: AIMessage) -> str:
    if isinstance(message.content, str):
        return ""
    blocks = [block for block in message.content if isinstance(block, Mapping) and block.get("type") in _REASONING]
    return "".join(str(block.get("reasoning") or block.get("thinking") or "") for block in blocks)
