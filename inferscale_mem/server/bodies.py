"""Reading chat requests: what they ask of memory, and what they make of the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inferscale_mem.chat_template import SYSTEM_ROLES
from inferscale_mem.errors import InputError
from inferscale_mem.handles import find, find_broken, strip_given
from inferscale_mem.json_limits import DEEPEST, check_depth, check_json
from inferscale_mem.memories import read_memories
from inferscale_mem.types import OWNER_FIELDS, Scope

FIELD = "inferscale"
"""Of a request: what Asked holds. Of an answer: the report."""
PROMPT_FIELDS = ("messages", "tools", "tool_choice", "documents", "chat_template_kwargs")
"""What a prompt is made of."""

_ORDER = "kv_transfer_params"
"""Of a request: handed to the engine unread."""

_CONCERNS_US = re.compile(rf'ism1\.|"{FIELD}"|{_ORDER}|\\u00')
"""An escape may spell any of these characters."""


def quick_text(body: bytes) -> str | None:
    """The body's text, if it may have to do with memories."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")  # as json.loads does, and so vLLM
    except ValueError:
        return None
    return text if _CONCERNS_US.search(text) else None


def read_chat(text: str) -> dict[str, Any] | None:
    """The request, if it has to do with memories; None if not, or if vLLM should say what is wrong with it.

    Raises:
        InputError: it is nested too deeply, or content of a message is neither text nor objects.
    """
    try:
        request: Any = json.loads(text)
    except ValueError:
        return None
    except RecursionError as error:
        raise InputError(f"The request is nested deeper than {DEEPEST} levels.") from error
    if not isinstance(request, dict):
        return None
    check_order(request)
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    if FIELD not in request and not handles_in(request) and not any(map(find_broken, _strings(request))):
        return None
    check_depth(request, "The request")
    for message in messages:
        content = message.get("content")
        good = all(isinstance(part, str | dict) for part in content) if isinstance(content, list) else False
        if not (good or content is None or isinstance(content, str)):
            raise InputError("Content of a message must be text, or a list of objects such as {'type': 'text', …}.")
    return request


def check_order(request: Any) -> None:
    """Raise InputError if a request has an order that would stop vLLM's engine, whoever it is for."""
    if isinstance(request, dict):
        check_json(request.get(_ORDER), _ORDER)


@dataclass(frozen=True)
class Asked:
    """What a request says in FIELD, ``{"memories": …, "scope": {"user_id": …}}``, both optional.

    Attributes:
        memories: handles that stand in no message.
        scope: whose facts may be shown; None: it is taken from the handles.
    """

    memories: tuple[str, ...] = ()
    scope: Scope | None = None


def read_asked(said: Any) -> Asked:
    """What the field says; nothing, if it is not there, or null.

    Raises:
        InputError: it has another form, or says what nobody knows. ScopeError: its scope names nobody. HandleError:
            something among its memories is no handle.
    """
    if said is None:
        return Asked()
    if not isinstance(said, dict):
        raise InputError(f"{FIELD!r} must be an object such as {_EXAMPLE}, not {_kind(said)}.")
    _check_names(FIELD, said, ("memories", "scope"))
    scope = said.get("scope")
    if scope is not None and not isinstance(scope, dict):
        raise InputError(f"{FIELD}.scope must be an object such as {{'user_id': 'alice'}}, not {_kind(scope)}.")
    _check_names(f"{FIELD}.scope", scope or {}, OWNER_FIELDS)
    memories = read_memories(said.get("memories"), f"{FIELD}.memories")
    return Asked(tuple(dict.fromkeys(memories)), None if scope is None else Scope.of(scope))


_EXAMPLE = "{'memories': ['ism1.…'], 'scope': {'user_id': 'alice'}}"


def _check_names(where: str, given: Iterable[str], known: Collection[str]) -> None:
    if unknown := sorted(name for name in given if name not in known):
        raise InputError(f"{where} has no {unknown[0][:60]!r}; it takes {', '.join(known)}.")


def _kind(value: Any) -> str:
    return {"list": "a list", "str": "text", "bool": "true or false"}.get(type(value).__name__, "a number")


def asked_handles(request: Mapping[str, Any], memories: Iterable[str] = ()) -> list[str]:
    """Handles of system messages, then ``memories``, in order, each once."""
    found = []
    for message in request["messages"]:
        if message.get("role") in SYSTEM_ROLES:
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            found += [one.handle for text in texts if isinstance(text, str) for one in find(text)]
    return list(dict.fromkeys([*found, *memories]))


def read_any(body: bytes) -> Any:
    """A body of whatever kind: its JSON, else its text."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")


def handles_in(said: Any) -> list[str]:
    """What has the form of a handle anywhere in this, orders aside, each once."""
    if isinstance(said, dict):
        said = {name: value for name, value in said.items() if name != _ORDER}
    return list(dict.fromkeys(one.handle for text in _strings(said) for one in find(text)))


def prompt_handles(request: Mapping[str, Any]) -> list[str]:
    """What has the form of a handle in all that may get into a prompt, each once."""
    return handles_in([request.get(name) for name in PROMPT_FIELDS])


def without(request: Mapping[str, Any], handles: Collection[str]) -> dict[str, Any]:
    """The request with these handles cut out of all that may get into a prompt."""
    cut = {name: _cut(request[name], handles) for name in PROMPT_FIELDS if name in request}
    return {**request, **cut} if handles else dict(request)


def _cut(value: Any, handles: Collection[str]) -> Any:
    if isinstance(value, str):
        return strip_given(value, handles)
    if isinstance(value, list):
        return [_cut(inner, handles) for inner in value]
    if isinstance(value, dict):
        return {strip_given(name, handles): _cut(inner, handles) for name, inner in value.items()}
    return value


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


def as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with what vLLM gives to templates of it: the arguments of its tool calls as objects, for one.

    Raises:
        InputError: its tool calls cannot be read.
    """
    role = message.get("role")
    kept = {name: message[name] for name in ("role", "content") if name in message}
    kept.update((name, message[name]) for name in ("name", "task") if isinstance(message.get(name), str))
    if role == "tool" and "tool_call_id" in message:
        kept["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if isinstance(reasoning, str):
            kept.update(reasoning=reasoning, reasoning_content=reasoning)
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = [_read_call(call) for call in calls]
    return kept


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError("A tool call of an assistant message must have a function with a name.")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    except RecursionError as error:
        raise InputError(f"The arguments of a tool call are nested deeper than {DEEPEST} levels.") from error
    check_depth(arguments, "The arguments of a tool call")
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
