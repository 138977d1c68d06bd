"""The model's tokenizer and chat template, over a Hugging Face tokenizer.

Text of people and text of chat templates are kept apart: in the first, the spelling of a control token such as
``<|im_end|>`` is ordinary characters; in the second it is the token.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import itertools
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from inferscale_mem.errors import ChatTemplateError, InputError, MissingDependencyError, ModelError
from inferscale_mem.types import Messages

_TRIED = ("It's 12:30 on 2024-05-01, isn't it?", "  naïve\tcafé\n\n東京 🙂", "<|im_start|>user\n<s>[INST]Hi</s>")
"""Texts on whose tokens tokenizers of one vocabulary may differ."""


class HFChatTokenizer:
    """``protocols.ChatTokenizer`` over a ``transformers.PreTrainedTokenizerBase``. Thread-safe.

    Args:
        tokenizer: the Hugging Face tokenizer. Nobody else should use it at the same time: its own switches for
            special tokens are shared state. ``load_tokenizer`` makes one of its own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._template_kwargs: dict[str, Any] = {}
        self._control = _control_tokens(tokenizer)
        self._literal = _without_control_tokens(tokenizer, self._control)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> HFChatTokenizer:
        """The same tokenizer, whose chat template is given these variables."""
        other = copy.copy(self)
        other._template_kwargs = dict(kwargs)
        return other

    @property
    def hf(self) -> Any:
        """The Hugging Face tokenizer, for libraries that want one (guided decoding)."""
        return self._tokenizer

    @property
    def control_tokens(self) -> Mapping[int, str]:
        """Token id -> spelling of every token that text of people must never yield."""
        return self._control

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    @cached_property
    def digest(self) -> str:
        """Equal for tokenizers that give the same tokens and render the same prompts."""
        template = getattr(self._tokenizer, "chat_template", None)
        tried = [self.encode(text, literal=literal) for text in _TRIED for literal in (True, False)]
        said = json.dumps([sorted(self._tokenizer.get_vocab().items()), template, tried])
        return hashlib.sha256(said.encode("ascii")).hexdigest()[:32]

    def encode(self, text: str, *, literal: bool) -> list[int]:
        """Token ids of ``text``, nothing added. ``literal``: spellings of special tokens are ordinary characters.

        Raises:
            InputError: the text holds a lone surrogate, or the tokenizer has no other way to write a control token
                that the text spells (literal only).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"The text is not valid Unicode ({error.reason}); remove lone surrogates.") from error
        with self._lock:
            return self._encode_literally(text) if literal else self._parse(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, special tokens left out unless told otherwise."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat template's text for these messages, ending where the answer starts.

        Raises:
            ChatTemplateError: the model has no template, or it refuses these messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "The model's tokenizer has no chat template; use a chat (instruct) model, or add a "
                "chat_template.jinja to its folder."
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_kwargs,
            )
        except Exception as error:  # a template is a program of its own: it may raise anything
            raise ChatTemplateError(
                f"The model's chat template refuses these messages: {error}. Check their roles, their order and that "
                "every content is text."
            ) from error
        if not isinstance(rendered, str):
            raise ChatTemplateError(f"The chat template gave {type(rendered).__name__} where text was expected.")
        return rendered

    def _parse(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False))

    def _encode_literally(self, text: str) -> list[int]:
        ids = self._encode_piece(text)
        spelled = sorted({self._control[i] for i in ids if i in self._control}, key=len, reverse=True)
        if not spelled:
            return ids
        # Some vocabularies hold a control token's spelling as an ordinary piece too: cut the spelling in two.
        ids = [i for piece in _cut(text, spelled) for i in self._encode_piece(piece)]
        for token in ids:
            if token in self._control:
                raise InputError(
                    f"This model cannot read {self._control[token]!r} as plain text; remove it from the text."
                )
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        if self._literal is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        return list(self._literal.encode(text, add_special_tokens=False).ids)


def load_tokenizer(path: str) -> HFChatTokenizer:
    """The tokenizer of a model: a local folder or a Hugging Face id.

    Raises:
        ModelError: it cannot be found or read.
        MissingDependencyError: transformers is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("transformers", "cpu") from error
    try:
        return HFChatTokenizer(transformers.AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"No usable tokenizer for {path!r}: {error}. Check the model's name or folder.") from error


def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Every added token except runs of white space (ordinary text in some models) and the unknown token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    unknown = getattr(backend.model, "unk_token", None) if backend is not None else tokenizer.unk_token
    unknown_is_text = unknown is not None and unknown not in (tokenizer.eos_token, tokenizer.bos_token)
    added: Mapping[str, int] = tokenizer.get_added_vocab()
    return {
        token_id: spelling
        for spelling, token_id in added.items()
        if spelling.strip() and not (unknown_is_text and spelling == unknown)
    }


def _without_control_tokens(tokenizer: Any, control: Mapping[int, str]) -> Any | None:
    """A copy of a fast tokenizer that does not look for control tokens; None for slow ones.

    The tokenizer's own ``split_special_tokens`` leaves out added tokens that are not marked special, such as
    ``<think>`` or ``<tool_call>``.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    layout = json.loads(backend.to_str())
    base = backend.get_vocab_size(with_added_tokens=False)
    kept = [token for token in layout["added_tokens"] if token["id"] not in control]
    # Ids beyond the model's own vocabulary are counted up, so tokens there get a spelling nobody knows instead.
    hidden = [
        {**token, "content": secrets.token_hex(32)}
        for token in layout["added_tokens"]
        if token["id"] in control and token["id"] >= base
    ]
    for added in (sorted([*kept, *hidden], key=lambda token: int(token["id"])), []):
        copy = type(backend).from_str(json.dumps({**layout, "added_tokens": added}))
        if all(copy.token_to_id(token["content"]) == token["id"] for token in added):
            break
    copy.no_truncation()
    copy.no_padding()
    return copy


def _cut(text: str, spellings: Sequence[str]) -> list[str]:
    """``text`` in pieces, each of the spellings cut after its first character."""
    cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, spellings)), text)]
    edges = [0, *cuts, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges) if start < end]
