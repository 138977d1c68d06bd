"""A model's chat template: what it can do, found out by asking it, and messages bent to that.

Templates differ, and some drop silently what they do not expect: a second system message, a system message in the
middle, the second of two user messages in a row. So each is probed once with marked messages, and what it would refuse
or lose is put where it keeps it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inferscale_mem.errors import ChatTemplateError, InputError
from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.tool_template import CallStart, Tools, ToolTemplate
from inferscale_mem.types import Message, Messages

SYSTEM_ROLES = ("system", "developer")

Chat = list[dict[str, Any]]
"""Messages whose content is text."""


def new_mark() -> str:
    """A word that nobody else has written, and that templates leave alone: it stands for something put in later."""
    return f"mark{secrets.token_hex(16)}"


def as_chat(messages: Messages) -> Chat:
    """The messages with their content as one text each; text blocks become lines, and "developer" is a system role.

    Raises:
        InputError: no messages, a message without a role, or content that is not text.
    """
    if not messages:
        raise InputError("There are no messages; give at least one.")
    return [_as_text(message) for message in messages]


def _as_text(message: Message) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InputError(f"A message has no role: {dict(message)!r}; give it one, e.g. 'user'.")
    role = "system" if role in SYSTEM_ROLES else role
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_block_text(block, role) for block in content)
    elif content is not None and not isinstance(content, str):
        raise InputError(f"Content of the {role} message is {type(content).__name__}; give text or text blocks.")
    return {**message, "role": role, "content": content or ""}


def _block_text(block: Any, role: str) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise InputError(f"The {role} message holds a content block of type {kind!r}; only text can be sent to the model.")


@dataclass(frozen=True)
class Traits:
    """What a template keeps of the messages it is given.

    Attributes:
        blocks: it takes content as lists of blocks only, not as text.
        system: it puts the system message in front of the conversation.
        system_anywhere: it keeps further system messages, wherever they stand.
        repeats: it keeps several messages of one role in a row.
    """

    blocks: bool
    system: bool
    system_anywhere: bool
    repeats: bool


class ChatTemplate:
    """Renders messages through a tokenizer's chat template, whatever the template can take. Thread-safe.

    Args:
        tokenizer: holds the template; not asked before the first rendering.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, chat: Chat, *, tools: Tools | None = None, start: CallStart | None = None) -> str:
        """The prompt's text.

        Args:
            chat: messages; with tools in play, what ``tools.prepare`` made of them.
            tools: likewise.
            start: have the answer begin as this call, where calls are written in JSON.

        Raises:
            ChatTemplateError: there is no template, or it refuses these messages.
        """
        return self._rendered(chat, "", tools, start)

    def render_around(
        self, chat: Chat, mark: str, *, tools: Tools | None = None, start: CallStart | None = None
    ) -> tuple[str, str]:
        """The prompt's text before and behind ``mark``, which stands once in the messages, for whole lines of text.

        Raises:
            ChatTemplateError: as render, or the template drops or repeats the marked message.
        """
        pieces = self._rendered(chat, mark, tools, start).split(mark)
        if len(pieces) != 2:
            raise ChatTemplateError(
                f"The model's chat template writes the message with the memories {len(pieces) - 1} times; memories "
                "need one that writes it once. Use another chat template."
            )
        return pieces[0], pieces[1]

    def render_between(
        self, chat: Chat, marks: Sequence[str], *, tools: Tools | None = None, start: CallStart | None = None
    ) -> list[str]:
        """The prompt's text cut at marks, which stand in the messages in this order.

        Raises:
            ChatTemplateError: as render, or the template drops, repeats or reorders a marked message.
        """
        rest, pieces = self._rendered(chat, "", tools, start), []
        for mark in marks:
            before, _, rest = rest.partition(mark)
            pieces.append(before)
        if (
            len(pieces) != len(set(marks))
            or any(mark in text for mark in marks for text in [*pieces, rest])
            or not rest
        ):
            raise ChatTemplateError(
                "The model's chat template drops, repeats or reorders human messages, so memories cannot stand before "
                'the latest one. Use memory_position="system".'
            )
        return [*pieces, rest]

    def _rendered(self, chat: Chat, mark: str, tools: Tools | None, start: CallStart | None) -> str:
        if start is not None:
            begun, _ = self.tools.prepare([start.message()], None, "")
            cut = start.cut(self._tokenizer.render(self._bent([*chat, *begun], mark), tools=tools))
            if cut is not None:
                return cut
        return self._tokenizer.render(self._bent(chat, mark), tools=tools)

    @cached_property
    def tools(self) -> ToolTemplate:
        """What it does with tools."""
        return ToolTemplate(self._plain)

    def _plain(self, chat: Chat, tools: Tools | None) -> str:
        return self._tokenizer.render(_in_blocks(chat) if self.traits.blocks else chat, tools=tools)

    @cached_property
    def traits(self) -> Traits:
        """What the template keeps.

        Raises:
            ChatTemplateError: there is no template, or it cannot render a single user message.
        """
        blocks = self._content_is_blocks()
        system = self._keeps("system user assistant user", blocks)
        return Traits(
            blocks=blocks,
            system=system,
            system_anywhere=system and self._keeps("system system user assistant system user", blocks),
            repeats=self._keeps("user user assistant assistant user", blocks),
        )

    def _content_is_blocks(self) -> bool:
        if self._keeps("user", blocks=False):
            return False
        if self._keeps("user", blocks=True):
            return True
        self._tokenizer.render([{"role": "user", "content": "Hello"}])  # has its own error, if there is no template
        raise ChatTemplateError("The model's chat template loses what the user says; use another chat template.")

    def _keeps(self, roles: str, blocks: bool) -> bool:
        """Whether a conversation of these roles is rendered, with every message in it once and in order."""
        chat: Chat = [{"role": role, "content": new_mark()} for role in roles.split()]
        try:
            text = self._tokenizer.render(_in_blocks(chat) if blocks else chat)
        except ChatTemplateError:
            return False
        marks = [message["content"] for message in chat]
        places = [text.find(mark) for mark in marks]
        return places == sorted(places) and all(text.count(mark) == 1 for mark in marks)

    def _bent(self, chat: Chat, mark: str) -> Chat:
        traits = self.traits
        if not traits.repeats:
            chat = _human_first(chat)
        if not traits.system:
            chat = _folded(chat, mark)
        elif not traits.system_anywhere:
            chat = _system_first(chat, mark)
        if not traits.repeats:
            chat = _alternating(chat, mark)
        return _in_blocks(chat) if traits.blocks else chat


def _in_blocks(chat: Chat) -> Chat:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]


def _system_first(chat: Chat, mark: str) -> Chat:
    """One system message, in front."""
    system = [message for message in chat if message["role"] == "system"]
    rest = [message for message in chat if message["role"] != "system"]
    return [_joined(system, mark), *rest] if system else rest


def _folded(chat: Chat, mark: str) -> Chat:
    """What the system messages say, at the top of the first user message."""
    system = [message for message in chat if message["role"] == "system"]
    rest = [message for message in chat if message["role"] != "system"]
    if not system:
        return rest
    first = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": _joined(system, mark)["content"]}, *rest]
    told = {**rest[first], "content": _joined([*system, rest[first]], mark)["content"]}
    return [*rest[:first], told, *rest[first + 1 :]]


def _human_first(chat: Chat) -> Chat:
    """An empty human message before an assistant that speaks first: where roles alternate, a human begins."""
    first = next((i for i, message in enumerate(chat) if message["role"] != "system"), None)
    if first is None or chat[first]["role"] != "assistant":
        return chat
    return [*chat[:first], {"role": "user", "content": ""}, *chat[first:]]


def _alternating(chat: Chat, mark: str) -> Chat:
    """Messages of one role in a row as one; not those that call tools, nor the tools' answers."""
    merged: Chat = []
    for message in chat:
        if merged and _mergeable(merged[-1], message):
            merged[-1] = _joined([merged[-1], message], mark)
        else:
            merged.append(message)
    return merged


def _mergeable(one: Message, other: Message) -> bool:
    calls = one.get("tool_calls") or other.get("tool_calls")
    return one["role"] == other["role"] and one["role"] in ("user", "assistant") and not calls


def _joined(messages: Sequence[Message], mark: str) -> dict[str, Any]:
    """The first message with the content of all, as paragraphs; what the mark stands for ends its own line."""
    text = ""
    for message in messages:
        glue = "" if not text else "\n" if mark and text.endswith(mark) else "\n\n"
        text = text + glue + message["content"] if message["content"] else text
    return {**messages[0], "content": text}
