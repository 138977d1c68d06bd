from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_mem.errors import InputError, ScopeError
from inferscale_mem.server import bodies
from inferscale_mem.types import Scope

A, B = "ism1.0123456789abcdef.0123456789abcdef", "ism1.1123456789abcdef.0123456789abcdef"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"{}", b'{"messages": []}', b'{"messages": [1]}', b"[" * 100_000, b"\xff"]
)
def test_what_is_no_chat_request_is_left_to_vllm(body: bytes) -> None:
    assert bodies.read_chat(body) is None


def test_handles_of_system_messages_and_memories() -> None:
    request = {
        "messages": [
            {"role": "system", "content": f"- {A}"},
            {"role": "developer", "content": [{"type": "text", "text": f"- {B}, {A}"}, {"type": "image_url"}, None]},
            {"role": "user", "content": "ism1.2123456789abcdef.0123456789abcdef"},
            {"role": "system"},
        ]
    }
    assert bodies.asked_handles(request, None) == [A, B]
    assert bodies.asked_handles(request, {"memories": [3, "other", A]}) == [A, B, "other"]
    assert bodies.asked_handles({"messages": []}, {"memories": "text"}) == []


@pytest.mark.parametrize(("asked", "scope"), [(None, None), ({}, None), ([], None), ({"scope": {"user_id": "a"}}, "a")])
def test_the_scope_a_request_names(asked: Any, scope: str | None) -> None:
    assert bodies.asked_scope(asked) == (Scope(user_id=scope) if scope else None)


def test_a_scope_that_names_nobody_is_refused() -> None:
    with pytest.raises(InputError):
        bodies.asked_scope({"scope": "alice"})
    for wrong in ({"user": "alice"}, {"user_id": "*"}, {"user_id": [3]}):
        with pytest.raises(ScopeError):
            bodies.asked_scope({"scope": wrong})


@pytest.mark.parametrize("option", [{"chat_template": "x"}, {"add_generation_prompt": False}, {"echo": True}])
def test_options_that_make_another_prompt(option: dict[str, Any]) -> None:
    bodies.check_prompt({"messages": [], "echo": False, "add_generation_prompt": True})
    with pytest.raises(InputError, match=next(iter(option))):
        bodies.check_prompt(option)


def test_template_variables_are_those_vllm_sets() -> None:
    assert bodies.template_kwargs({}, {"a": 1}) == {"a": 1}
    assert bodies.template_kwargs({"chat_template_kwargs": {"a": 2}}, {"a": 1, "b": 1}) == {"a": 2, "b": 1}
    effort = {"reasoning_effort": "none"}
    assert bodies.template_kwargs(effort, {}) == {"reasoning_effort": "none", "enable_thinking": False}
    assert bodies.template_kwargs({"reasoning_effort": "low"}, {})["enable_thinking"] is True


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"function": {"name": "f", "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, broken, 3]}
    read = bodies.with_read_calls(message)["tool_calls"]
    assert read == [{**call, "function": {"name": "f", "arguments": {"x": 1}}}, broken, 3]
    assert call["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]


@pytest.mark.parametrize("body", [f'{{"prompt": ["- {A}.", "{B}{A}"], "x": "{A}"}}'.encode(), f"\xff {A} {B}".encode()])
def test_handles_anywhere_in_a_body(body: bytes) -> None:
    assert bodies.handles_anywhere(body)[0] == A and len(bodies.handles_anywhere(body)) <= 2
    assert bodies.handles_anywhere(b'{"prompt": "ism1. of a kind"}') == []


def test_handles_are_looked_for_in_what_json_says_not_in_how() -> None:
    body = json.dumps({"input": [{"content": f"Memories:\n{A}"}], "b": B}).replace("ism1", "\\u0069sm1")
    assert bodies.handles_anywhere(body.encode()) == [A, B]
    order = {"prompt": "Hello.", "kv_transfer_params": {"inferscale": {"op": "drop", "handles": [A]}}}
    assert bodies.handles_anywhere(json.dumps(order).encode()) == []
