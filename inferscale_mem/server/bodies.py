"""Reading chat requests: what they ask of memory, and what they make of the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from inferscale_mem.chat_template import SYSTEM_ROLES
from inferscale_mem.errors import InputError
from inferscale_mem.handles import find
from inferscale_mem.types import Scope

FIELD = "inferscale"
"""Of a request: ``{"memories": [handles], "scope": {"user_id": …}}``, both optional. Of an answer: the report."""
OTHER_PROMPTS = ("chat_template", "continue_final_message", "documents", "echo", "truncate_prompt_tokens")
"""Options that make another prompt than the one planned here."""


def read_chat(body: bytes) -> dict[str, Any] | None:
    """The request; None if vLLM should say what is wrong with it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    messages = request.get("messages") if isinstance(request, dict) else None
    good = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    return request if good else None


def asked_handles(request: Mapping[str, Any], asked: Any) -> list[str]:
    """Handles of system messages and of ``memories``, in order, each once."""
    found = []
    for message in request["messages"]:
        if message.get("role") in SYSTEM_ROLES:
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            found += [one.handle for text in texts if isinstance(text, str) for one in find(text)]
    memories = asked.get("memories") if isinstance(asked, dict) else None
    given = [text for text in memories if isinstance(text, str)] if isinstance(memories, list) else []
    return list(dict.fromkeys([*found, *given]))


def handles_anywhere(body: bytes) -> list[str]:
    """What has the form of a handle in a body, whatever it is, each once; orders aside, which the engine checks."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = body.decode("utf-8", "replace")
    if isinstance(said, dict):
        said.pop("kv_transfer_params", None)
    return list(dict.fromkeys(one.handle for text in _strings(said) for one in find(text)))


def _strings(said: Any) -> Iterator[str]:
    left = [said]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*reversed(value.values()), *value]
        elif isinstance(value, list):
            left += reversed(value)


def asked_scope(asked: Any) -> Scope | None:
    """The scope a request names.

    Raises:
        ScopeError: it names nobody.
        InputError: it cannot be read.
    """
    scope = asked.get("scope") if isinstance(asked, dict) else None
    if scope is None:
        return None
    if not isinstance(scope, dict):
        raise InputError(f"{FIELD}.scope must be an object such as {{'user_id': 'alice'}}.")
    return Scope.of(scope)


def check_prompt(request: Mapping[str, Any]) -> None:
    """Whether the prompt is one that can be planned.

    Raises:
        InputError: an option makes another one.
    """
    other = next((name for name in OTHER_PROMPTS if request.get(name)), None)
    if request.get("add_generation_prompt") is False:
        other = "add_generation_prompt"
    if other:
        raise InputError(f"memories cannot be combined with {other}")


def template_kwargs(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template, as vLLM would set them."""
    given = request.get("chat_template_kwargs")
    kwargs = {**defaults, **(given if isinstance(given, dict) else {})}
    if (effort := request.get("reasoning_effort")) is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def with_read_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, which is how templates take them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_read_call(call) for call in calls]}


def _read_call(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}
