from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_mem.errors import InputError, ScopeError
from inferscale_mem.server import bodies
from inferscale_mem.types import Scope

A, B = "ism1.0123456789abcdef.0123456789abcdef", "ism1.1123456789abcdef.0123456789abcdef"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', "{}", '{"messages": []}', '{"messages": [1], "inferscale": {}}', '{"inferscale": 1}']
)
def test_what_is_no_chat_request_is_left_to_vllm(text: str) -> None:
    assert bodies.read_chat(text) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("spelled", [A, A.replace("i", "\\u0069"), A.replace(".", "\\u002E"), "\\u0069" + A[1:]])
def test_handles_are_seen_however_they_are_written(encoding: str, spelled: str) -> None:
    body = json.dumps({"messages": [{"role": "system", "content": "- HERE"}]}).replace("HERE", spelled)
    text = bodies.quick_text(body.encode(encoding))
    assert text is not None
    request = bodies.read_chat(text)
    assert request is not None and bodies.asked_handles(request, None) == [A]


@pytest.mark.parametrize(
    "body", [b'{"messages": [{"role": "user", "content": "\\u00e9 \xc3\xa9"}]}', b"\xff", b"\x80ism1."]
)
def test_what_has_nothing_to_do_with_memories_is_not_looked_into(body: bytes) -> None:
    text = bodies.quick_text(body)
    assert text is None or bodies.read_chat(text) is None


@pytest.mark.parametrize("deep", [101, 900, 100_000])
def test_requests_that_are_nested_too_deeply(deep: int) -> None:
    text = '{"messages": [], "inferscale": {}, "x": %s}'
    with pytest.raises(InputError, match="deep"):
        bodies.read_chat(text % ("[" * deep + "]" * deep))
    assert bodies.read_chat(text % ("[" * 99 + "]" * 99)) is not None


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


def test_messages_are_rendered_with_what_vllm_gives_to_templates() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    others = [{"function": {"name": "f", "arguments": arguments}} for arguments in ("{", "[1]", None, "", {"x": 1})]
    message = {"role": "assistant", "content": None, "tool_calls": [call, *others], "reasoning": "hm", "foo": 1}
    read = bodies.as_rendered(message)
    assert [one["function"]["arguments"] for one in read.pop("tool_calls")] == [{"x": 1}, {}, {}, {}, {}, {"x": 1}]
    assert read == {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm"}
    assert call["function"]["arguments"] == '{"x": 1}'
    assert bodies.as_rendered({"role": "user", "content": "x", "tool_calls": 5, "name": 3}) == {
        "role": "user",
        "content": "x",
    }


@pytest.mark.parametrize("call", [3, "f", {}, {"function": 5}, {"function": {}}, {"function": {"name": 5}}])
def test_tool_calls_that_cannot_be_read(call: Any) -> None:
    with pytest.raises(InputError, match="tool call"):
        bodies.as_rendered({"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.mark.parametrize("deep", [101, 900, 100_000])
def test_arguments_that_are_nested_too_deeply(deep: int) -> None:
    arguments = '{"x": %s}' % ("[" * deep + "]" * deep)
    with pytest.raises(InputError, match="deep"):
        bodies.as_rendered({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})


@pytest.mark.parametrize("body", [f'{{"prompt": ["- {A}.", "{B}{A}"], "x": "{A}"}}'.encode(), f"\xff {A} {B}".encode()])
def test_handles_anywhere_in_a_body(body: bytes) -> None:
    assert bodies.handles_anywhere(body)[0] == A and len(bodies.handles_anywhere(body)) <= 2
    assert bodies.handles_anywhere(b'{"prompt": "ism1. of a kind"}') == []


def test_handles_are_looked_for_in_what_json_says_not_in_how() -> None:
    body = json.dumps({"input": [{"content": f"Memories:\n{A}"}], "b": B}).replace("ism1", "\\u0069sm1")
    assert bodies.handles_anywhere(body.encode()) == [A, B]
    order = {"prompt": "Hello.", "kv_transfer_params": {"inferscale": {"op": "drop", "handles": [A]}}}
    assert bodies.handles_anywhere(json.dumps(order).encode()) == []
