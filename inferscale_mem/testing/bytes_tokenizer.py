"""A tokenizer without a vocabulary file: one token a byte, and a few control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_mem.errors import ChatTemplateError
from inferscale_mem.types import Messages

CONTROL = {"<|start|>": 256, "<|end|>": 257}
"""Spelling -> token id."""
END = CONTROL["<|end|>"]
VOCAB_SIZE = 258
_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")


class BytesTokenizer:
    """``protocols.ChatTokenizer``: ids 0 to 255 are bytes of UTF-8."""

    def encode(self, text: str, *, literal: bool) -> list[int]:
        """Token ids of ``text``, nothing added. ``literal``: spellings of control tokens are ordinary characters."""
        if literal:
            return list(text.encode())
        return [token for part in _CONTROL.split(text) for token in self._part(part)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, control tokens left out unless told otherwise."""
        spelled = {token: b"" if skip_special_tokens else text.encode() for text, token in CONTROL.items()}
        text = b"".join(bytes([token]) if token < 256 else spelled.get(token, b"") for token in token_ids)
        return text.decode(errors="replace")

    def render(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """``<|start|>role``, a newline, the content, ``<|end|>`` and a newline for each message.

        Raises:
            ChatTemplateError: a content is not text.
        """
        turns = [("tools", json.dumps([dict(tool) for tool in tools]))] if tools else []
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise ChatTemplateError(f"This template takes text only, not {message.get('content')!r}.")
            turns.append((message["role"], message["content"]))
        return "".join(f"<|start|>{role}\n{content}<|end|>\n" for role, content in turns) + "<|start|>assistant\n"

    def _part(self, text: str) -> list[int]:
        return [CONTROL[text]] if text in CONTROL else list(text.encode())
