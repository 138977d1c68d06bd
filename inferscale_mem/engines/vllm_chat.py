"""Chat requests as vLLM's own server reads them: which it refuses, whose prompt it makes itself, and how."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import resolve_chat_template_kwargs

from inferscale_mem.errors import InputError

OTHER_PROMPTS = (
    *("chat_template", "continue_final_message", "documents", "echo", "truncate_prompt_tokens", "add_special_tokens"),
)
"""Options that make another prompt than the one planned here."""

_OURS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"documents"}
"""Names that a chat template's variables must not have: they are what a template is called with."""

_OVERRULED = {"add_generation_prompt", "continue_final_message"}
"""Of these, what vLLM takes from the request's own fields, whatever ``chat_template_kwargs`` says."""


@dataclass(frozen=True)
class ChatReading:
    """What vLLM makes of a chat request.

    Attributes:
        refused: it answers with an error of its own, and no prompt.
        other: the option that makes another prompt than messages and tools alone; "" if there is none.
        media: it makes the prompt itself even if it is given token ids: the messages hold more than text.
        variables: what its chat template gets besides messages and tools.
        beams: it answers by beam search, whose requests are its own and carry no orders.
    """

    refused: bool = False
    other: str = ""
    media: bool = False
    variables: Mapping[str, Any] | None = None
    beams: bool = False


def read_request(request: Mapping[str, Any], tokenizer: Any, defaults: Mapping[str, Any]) -> ChatReading:
    """Read a chat request as vLLM will.

    Args:
        request: the body.
        tokenizer: of the model, with the server's chat template.
        defaults: variables of the template that the server was started with.

    Raises:
        InputError: vLLM breaks on it, or it sets in ``chat_template_kwargs`` what is no variable of the template.
    """
    given = request.get("chat_template_kwargs")
    if wrong := sorted((_OURS - _OVERRULED) & set(given if isinstance(given, dict) else ())):
        raise InputError(f"chat_template_kwargs must not hold {', '.join(wrong)}: only variables of the chat template.")
    try:
        # Validating changes what it is given; and it takes the ids out if it will not use them.
        copied = copy.deepcopy({**request, "kv_transfer_params": {"prompt_token_ids": [0]}})
        read = ChatCompletionRequest.model_validate(copied)
    except (ValidationError, VLLMValidationError):
        return ChatReading(refused=True)
    except Exception as error:
        raise InputError(f"The request cannot be read: {error}") from error
    other = next((name for name in OTHER_PROMPTS if getattr(read, name)), "")
    if not read.add_generation_prompt:
        other = other or "add_generation_prompt"
    merged = read.build_chat_params(None, "auto").with_defaults(dict(defaults)).chat_template_kwargs
    if merged.get("documents"):
        other = other or "documents"
    return ChatReading(
        other=other,
        media="prompt_token_ids" not in (read.kv_transfer_params or {}),
        variables=_variables(tokenizer, {name: value for name, value in merged.items() if name not in _OURS}),
        beams=read.use_beam_search,
    )


def _variables(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those that the template has a use for: vLLM gives it no others."""
    template = getattr(tokenizer, "chat_template", None) or ""
    every = template.values() if isinstance(template, dict) else [template]
    return {name: value for one in every for name, value in _used(tokenizer, one, given).items()}


def _used(tokenizer: Any, template: str, given: dict[str, Any]) -> dict[str, Any]:
    return dict(resolve_chat_template_kwargs(tokenizer, template, given, raise_on_unexpected=False))
