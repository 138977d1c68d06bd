from __future__ import annotations

import json
import re
from typing import Any

import pytest

from inferscale_mem.errors import InputError, ScopeError
from inferscale_mem.server import bodies
from inferscale_mem.types import Scope

A, B, C = (f"ism1.{digit}123456789abcdef.0123456789abcdef" for digit in "012")


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
    assert request is not None and bodies.asked_handles(request) == [A]


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
    assert bodies.asked_handles(request) == [A, B]
    assert bodies.asked_handles(request, (C, A)) == [A, B, C]
    assert bodies.asked_handles({"messages": []}, ()) == []


@pytest.mark.parametrize("memories", [[A, B, A], [{"memory": A, "score": 1}, {"memory": B}], {"results": [A, B]}])
def test_memories_in_every_form_search_gives(memories: Any) -> None:
    assert bodies.read_asked({"memories": memories}) == bodies.Asked((A, B))


@pytest.mark.parametrize("said", [None, {}, {"memories": None, "scope": None}, {"memories": []}])
def test_a_request_that_asks_for_nothing(said: Any) -> None:
    assert bodies.read_asked(said) == bodies.Asked()


def test_the_scope_a_request_names() -> None:
    assert bodies.read_asked({"scope": {"user_id": "a"}}).scope == Scope(user_id="a")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(([], "not a list"), ("alice", "not text"), (True, "not true or false"), (3.5, "not a number")),
        *(([A], "'memories': "), ({"memory": [A]}, "no 'memory'; it takes memories, scope")),
        *(({"memories": A}, "inferscale.memories takes a search's answer or a list of handles, not str"),),
        *(({"memories": {"memory": A}}, "without 'results'"), ({"memories": 3}, "list of handles")),
        *(({"memories": [A, text]}, "no handle; give what search") for text in ("Likes tea", 3, None, {}, A + "x")),
        *(({"scope": "alice"}, "scope must be an object"), ({"scope": ["alice"]}, "{'user_id': 'alice'}")),
        ({"scope": {"user_id": "alice", "user": "bob"}}, "no 'user'; it takes user_id, agent_id, run_id"),
    ],
)
def test_what_cannot_be_read_is_refused_and_says_what_to_give(said: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        bodies.read_asked(said)


@pytest.mark.parametrize("scope", [{}, {"user_id": "*"}, {"user_id": [3]}, {"user_id": None}])
def test_a_scope_that_names_nobody_is_refused(scope: Any) -> None:
    with pytest.raises(ScopeError):
        bodies.read_asked({"scope": scope})


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
    assert bodies.handles_in(bodies.read_any(body))[0] == A and len(bodies.handles_in(bodies.read_any(body))) <= 2
    assert bodies.handles_in(bodies.read_any(b'{"prompt": "ism1. of a kind"}')) == []


def test_handles_are_looked_for_in_what_json_says_not_in_how() -> None:
    body = json.dumps({"input": [{"content": f"Memories:\n{A}"}], "b": B}).replace("ism1", "\\u0069sm1")
    assert bodies.handles_in(bodies.read_any(body.encode())) == [A, B]
    order = {"prompt": "Hello.", "kv_transfer_params": {"inferscale": {"op": "drop", "handles": [A]}}}
    assert bodies.handles_in(bodies.read_any(json.dumps(order).encode())) == []


@pytest.mark.parametrize("order", [json.loads('{"a":' * 900 + "1" + "}" * 900), {"a": 10**30}, {"a": "\ud800"}])
def test_an_order_that_no_engine_can_take_is_refused_with_memories_or_without(order: Any) -> None:
    """vLLM hands it on unread, and its engine died of one that was nested too deeply."""
    request = {"messages": [{"role": "user", "content": "Hello."}], "kv_transfer_params": order}
    with pytest.raises(InputError, match="kv_transfer_params"):
        bodies.read_chat(str(bodies.quick_text(json.dumps(request).encode())))
    with pytest.raises(InputError, match="kv_transfer_params"):
        bodies.check_order(bodies.read_any(json.dumps({"prompt": "Hello.", **request}).encode()))
    assert bodies.read_chat(json.dumps({**request, "kv_transfer_params": {"a": [1]}})) is None
