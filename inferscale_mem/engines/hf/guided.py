"""Answers that match a JSON schema, by xgrammar: the library that vLLM uses for it too."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inferscale_mem.errors import InputError, MissingDependencyError


class Guide:
    """Which tokens may come next in one answer.

    Args:
        library: the xgrammar module.
        grammar: a compiled grammar.
        vocab_size: of the logits.
    """

    def __init__(self, library: Any, grammar: Any, vocab_size: int) -> None:
        self._library = library
        self._matcher = library.GrammarMatcher(grammar)
        self._bits = library.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: torch.Tensor) -> None:
        """Set logits [vocab] of tokens that may not come next to -inf, in place."""
        self._matcher.fill_next_token_bitmask(self._bits, 0)
        self._library.apply_token_bitmask_inplace(logits.unsqueeze(0), self._bits.to(logits.device))

    def accept(self, token: int) -> bool:
        """Go on by a token that was chosen; returns whether the answer is complete."""
        if not self._matcher.accept_token(token):
            raise AssertionError(f"token {token} was masked")
        return bool(self._matcher.is_terminated())


class Guides:
    """Compiles schemas for one model.

    Args:
        tokenizer: the Hugging Face tokenizer.
        vocab_size: of the model's logits, which may be padded beyond the tokenizer's.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = list(stop_token_ids)
        self._compiler: Any = None

    def make(self, schema: Mapping[str, Any], n: int) -> list[Guide]:
        """Guides for n answers of one request.

        Raises:
            MissingDependencyError: xgrammar is not installed.
            InputError: not a JSON schema, or one that xgrammar cannot read.
        """
        library = _xgrammar()
        if self._compiler is None:
            info = library.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._stop_token_ids
            )
            self._compiler = library.GrammarCompiler(info)
        try:
            # Compact: small models can go on with white space for ever.
            grammar = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"json_schema cannot be used: {error}") from error
        return [Guide(library, grammar, self._vocab_size) for _ in range(n)]


def _xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise MissingDependencyError("xgrammar", "cpu") from error
