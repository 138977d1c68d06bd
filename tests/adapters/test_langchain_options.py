"""What a call may set, and how it relates to what the model has."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_mem.adapters.langchain.options import read_options, read_scope
from inferscale_mem.errors import HandleError, InputError, ScopeError
from inferscale_mem.memories import read_memories
from inferscale_mem.types import Sampling, Scope

HANDLE = "ism1.0123456789abcdef.ghjkmnpqrstvwxyz"
OTHER = "ism1.ghjkmnpqrstvwxyz.0123456789abcdef"


def sampling(defaults: dict[str, Any], call: dict[str, Any]) -> Sampling:
    return read_options(defaults, call, ["m"]).sampling


def test_a_call_overrides_the_model_and_none_does_not() -> None:
    found = sampling({"temperature": 0.5, "max_tokens": 9, "n": 1}, {"temperature": 0, "max_tokens": None, "seed": 3})
    assert found == Sampling(temperature=0, max_tokens=9, seed=3)


def test_stop_of_the_call_overrides_the_models_own() -> None:
    assert sampling({"stop": ["a", "b"]}, {}).stop == ("a", "b")
    assert sampling({"stop": "a"}, {}).stop == ("a",)
    assert sampling({"stop": ["a"]}, {"stop": ["c"]}).stop == ("c",)
    assert sampling({"stop": ["a"]}, {"stop": []}).stop == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": 3}, 3),
        ({"logprobs": -1}, -1),
    ],
)
def test_logprobs_in_both_spellings(given: dict[str, Any], expected: int | None) -> None:
    assert sampling({}, given).logprobs == expected


@pytest.mark.parametrize(
    "call",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"top_p": 1.5},
        {"n": 0},
        {"stop": [""]},
        {"stop": [1]},
        {"logprobs": -2},
        {"top_logprobs": 2},
        {"model": "another"},
        {"memory": []},
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_by_name(call: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(call)) if "model" not in call else "another"):
        read_options({}, call, ["m"])


def test_memories_in_every_form_search_gives() -> None:
    results = [{"id": "1", "memory": HANDLE, "score": 0.5}, {"id": "2", "memory": OTHER}]
    assert read_memories({"results": results}) == (HANDLE, OTHER)
    assert read_memories(results) == (HANDLE, OTHER)
    assert read_memories([HANDLE, OTHER]) == (HANDLE, OTHER)
    assert read_memories({"results": []}) == read_memories([]) == read_memories(None) == ()


@pytest.mark.parametrize("memories", [HANDLE, 5, {"memory": HANDLE}], ids=str)
def test_memories_that_are_no_list_are_refused(memories: Any) -> None:
    with pytest.raises(InputError, match="memories="):
        read_memories(memories)


@pytest.mark.parametrize("item", ["Likes tea", {"memory": "Likes tea"}, {}, None, HANDLE + "x", "x" * 500], ids=repr)
def test_text_among_the_memories_is_refused(item: Any) -> None:
    with pytest.raises(HandleError, match="no handle") as caught:
        read_memories([HANDLE, item])
    assert len(str(caught.value)) < 300


def test_scope_in_every_form() -> None:
    ada = Scope(user_id="ada")
    assert read_scope({}) is None
    assert (
        read_scope({"scope": {"user_id": "ada"}}) == read_scope({"scope": ada}) == read_scope({"user_id": "ada"}) == ada
    )


def test_scope_of_the_call_replaces_the_models_own() -> None:
    own = {"scope": {"user_id": "ada", "run_id": "1"}}
    assert read_options(own, {}, ["m"]).scope == Scope(user_id="ada", run_id="1")
    assert read_options(own, {"user_id": "bob"}, "m").scope == Scope(user_id="bob")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"scope": {"user_id": "ada"}, "run_id": "1"}, InputError),
        ({"scope": {"user": "ada"}}, InputError),
        ({"scope": "ada"}, InputError),
        ({"scope": {}}, ScopeError),
        ({"user_id": "*"}, ScopeError),
        ({"user_id": " "}, ScopeError),
    ],
    ids=str,
)
def test_scopes_that_name_nobody_are_refused(values: dict[str, Any], error: type[InputError]) -> None:
    with pytest.raises(error):
        read_scope(values)
