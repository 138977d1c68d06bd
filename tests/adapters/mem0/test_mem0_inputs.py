"""Bad input is refused by name, before anything is stored; what comes back through ``add`` is recognised."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from mem0.exceptions import ValidationError as Mem0ValidationError
from mem0_helpers import texts

from inferscale_mem import InferScaleError, InferScaleMemory
from inferscale_mem.adapters.langchain.options import read_scope
from inferscale_mem.adapters.mem0 import inputs
from inferscale_mem.adapters.mem0.errors import MessagesError, MissingOwnerError
from inferscale_mem.errors import FactError, InputError, ScopeError
from inferscale_mem.types import Scope

ALICE = {"user_id": "alice"}
HANDLE = "ism1.0123456789abcdef.0123456789abcdef"
SURROGATE = "broken \ud83d text"


def stored(memory: InferScaleMemory) -> list[str]:
    return [item["memory"] for item in memory.get_all(filters=ALICE, top_k=100)["results"]]


@pytest.mark.parametrize(
    "messages, error",
    [
        ("", FactError),
        (" \n\t", FactError),
        ("\u200b\u200d", FactError),
        ([{"role": "user", "content": ""}], FactError),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], FactError),
        (SURROGATE, FactError),
        ([{"role": "user", "content": "fine"}, {"role": "user", "content": SURROGATE}], FactError),
        ([{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}], FactError),
        ("word " * 12_000, FactError),
        (7, MessagesError),
        (None, MessagesError),
        (["I live in Lyon."], MessagesError),
        ([{"content": "I live in Lyon."}], MessagesError),
        ([{"role": "user", "content": 7}], MessagesError),
    ],
)
def test_what_cannot_be_stored_is_refused(memory: InferScaleMemory, messages: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        memory.add(messages, infer=False, **ALICE)
    assert isinstance(caught.value, InferScaleError)
    assert stored(memory) == []


@pytest.mark.parametrize(
    "bad", [{"role": "user", "content": SURROGATE}, "text", {"role": "user", "content": "y" * 9999}]
)
def test_one_bad_message_refuses_all(memory: InferScaleMemory, bad: Any) -> None:
    with pytest.raises(InputError):
        memory.add([{"role": "user", "content": "I live in Lyon."}, bad], infer=False, **ALICE)
    assert stored(memory) == []


def test_mem0s_type_for_the_same_thing(memory: InferScaleMemory) -> None:
    with pytest.raises(Mem0ValidationError) as caught:
        memory.add("I live in Lyon.")
    assert isinstance(caught.value, MissingOwnerError) and isinstance(caught.value, ValueError)
    assert caught.value.error_code == "VALIDATION_001"
    with pytest.raises(Mem0ValidationError) as caught:
        memory.add(7, user_id="alice")
    assert caught.value.error_code == "VALIDATION_003"
    with pytest.raises(Mem0ValidationError, match="memory_type"):
        memory.add("x", user_id="alice", memory_type="episodic")


@pytest.mark.parametrize("call", ["search", "get_all", "delete_all"])
def test_no_owner(memory: InferScaleMemory, call: str) -> None:
    calls = {
        "search": lambda: memory.search("x"),
        "get_all": lambda: memory.get_all(),
        "delete_all": lambda: memory.delete_all(),
    }
    with pytest.raises(ScopeError, match="user_id"):
        calls[call]()


def test_owners_at_the_top_level_of_search_are_refused_as_mem0_does(memory: InferScaleMemory) -> None:
    with pytest.raises(ValueError, match="Top-level entity parameters"):
        memory.search("x", user_id="alice")
    with pytest.raises(ValueError, match="Top-level entity parameters"):
        memory.get_all(user_id="alice")


@pytest.mark.parametrize("user", ["", " ", "*", "a b", "\ud83d", True, 1.5, ["a"], {"in": ["a", "b"]}])
def test_ids_that_name_nobody(memory: InferScaleMemory, user: Any) -> None:
    with pytest.raises(InputError):
        memory.add("I live in Lyon.", user_id=user, infer=False)
    with pytest.raises(InputError):
        memory.search("x", filters={"user_id": user})


def test_numbers_and_uuids_are_ids_everywhere(memory: InferScaleMemory) -> None:
    """Apps pass the key of a row of their database, to the memory and to the chat model."""
    for user in (5, UUID(int=7)):
        memory.add("I live in Lyon.", user_id=user, infer=False)
        handle = memory.search("Lyon", filters={"user_id": user})["results"][0]["memory"]
        assert memory.service.resolve([handle], Scope.of({"user_id": user})).facts.keys() == {handle}
    assert Scope.of({"user_id": 5}) == Scope.of({"user_id": " 5 "}) == Scope(user_id="5")
    assert read_scope({"user_id": 5}) == read_scope({"scope": {"user_id": 5}}) == Scope(user_id="5")


BROKEN = [{"a": object()}, {"a": [object()]}, {"a": "\ud83d"}, {"\ud83d": 1}, {"created_at": 5}, {"hash": {"a": 1}}]


@pytest.mark.parametrize("metadata", ["text", 7, [1], {1: "number"}, *BROKEN])
def test_metadata_of_a_wrong_kind(memory: InferScaleMemory, metadata: Any) -> None:
    with pytest.raises(InputError, match="metadata"):
        memory.add("I live in Lyon.", metadata=metadata, infer=False, **ALICE)
    assert stored(memory) == []
    fact = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    with pytest.raises(InputError, match="metadata"):
        memory.update(fact, metadata=metadata)
    assert memory.get(fact).get("metadata") is None


@pytest.mark.parametrize("query", ["", "  ", SURROGATE, None, 7])
def test_queries_that_cannot_be_searched_for(memory: InferScaleMemory, query: Any) -> None:
    with pytest.raises(ValueError):
        memory.search(query, filters=ALICE)


@pytest.mark.parametrize("text", ["", "  ", HANDLE, SURROGATE, 7, "word " * 12_000])
def test_updates_to_what_cannot_be_stored(memory: InferScaleMemory, text: Any) -> None:
    fact = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    for arguments in ({"text": text}, {"data": text}):
        with pytest.raises(FactError):
            memory.update(fact, **arguments)
    assert stored(memory) == ["I live in Lyon."]


def test_updates_of_nothing_and_of_nobody(memory: InferScaleMemory) -> None:
    with pytest.raises(ValueError, match="not found"):
        memory.update("00000000-0000-0000-0000-000000000000", "x")
    with pytest.raises(ValueError, match="At least one of"):
        memory.update("00000000-0000-0000-0000-000000000000")
    with pytest.raises(ValueError, match="not found"):
        memory.delete("00000000-0000-0000-0000-000000000000")


@pytest.mark.parametrize("nobody", [None, "", " ", True, ["x"]])
def test_ids_that_are_none(memory: InferScaleMemory, nobody: Any) -> None:
    calls = [memory.get, memory.delete, memory.history, lambda row: memory.update(row, "I live in Oslo.")]
    for call in calls:
        with pytest.raises(InputError, match="is no id; give the 'id' of a memory"):
            call(nobody)


@pytest.mark.parametrize("spell", [str.upper, lambda row: row.replace("-", ""), UUID])
def test_other_spellings_of_an_id(memory: InferScaleMemory, spell: Any) -> None:
    """Qdrant knows them; history, and what handles stand for, must not end up under another id."""
    row = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    memory.update(spell(row), "I live in Oslo.")
    assert memory.get(spell(row))["memory"] == "I live in Oslo."
    (handle,) = texts(memory.search("where", filters=ALICE, threshold=0.0))
    assert memory.resolve(handle) == "I live in Oslo."
    memory.delete(spell(row))
    assert [line["event"] for line in memory.history(row)] == ["ADD", "UPDATE", "DELETE"]
    assert memory.history(spell(row)) == memory.history(row)
    assert memory.resolve(handle) == handle and memory.service.index.facts() == []


def test_emoji_and_other_scripts_are_text(memory: InferScaleMemory) -> None:
    for text in ("🎉🎂", "我住在里昂。", "أعيش في ليون"):
        memory.add(text, infer=False, **ALICE)
    assert sorted(stored(memory)) == sorted(["🎉🎂", "我住在里昂。", "أعيش في ليون"])
    assert memory.service.wait(30) and not memory.service.recorder.failures


# What comes back.


def test_handles_are_not_stored(memory: InferScaleMemory) -> None:
    memory.add("I live in Lyon.", infer=False, **ALICE)
    handle = memory.search("Lyon", filters=ALICE)["results"][0]["memory"]
    assert memory.add(handle, infer=False, **ALICE) == {"results": []}
    assert memory.add(f"- {handle}\n- {HANDLE}", infer=False, **ALICE) == {"results": []}
    memory.add(f"I also have two cats. {handle}", infer=False, **ALICE)
    assert sorted(stored(memory)) == ["I also have two cats.", "I live in Lyon."]


def test_clean_messages() -> None:
    clean = inputs.clean_messages
    assert clean("I live in Lyon.") == [{"role": "user", "content": "I live in Lyon."}]
    assert clean({"role": "user", "content": "x", "name": "Al"}) == [{"role": "user", "content": "x", "name": "Al"}]
    assert clean([]) == []
    tool_call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    blank = {"role": "assistant", "content": "  "}
    said = {"role": "user", "content": "x"}
    assert clean([tool_call, blank, said]) == [tool_call, said]
    block = {"role": "user", "content": [{"type": "text", "text": f"Hello {HANDLE}"}, {"type": "image_url"}]}
    assert clean([block])[0]["content"] == [{"type": "text", "text": "Hello"}, {"type": "image_url"}]
    assert block["content"][0]["text"].endswith(HANDLE), "the argument is not changed"


def test_recalled_texts_are_recognised_in_system_messages_only() -> None:
    facts = ["I live in Lyon.", "I have two cats."]
    system = {"role": "system", "content": "Be kind. Memories:\n- I live in  Lyon.\n2. i have two cats.\n- I am new."}
    user = {"role": "user", "content": "I live in Lyon."}
    assert inputs.without_recalled([system, user], lambda: facts) == [
        {"role": "system", "content": "Be kind. Memories:\n- I am new."},
        user,
    ]
    only = {"role": "system", "content": "- I live in Lyon."}
    assert inputs.without_recalled([only, user], lambda: facts) == [user]


def test_facts_are_looked_up_only_for_system_messages() -> None:
    user = [{"role": "user", "content": "I live in Lyon."}]
    assert inputs.without_recalled(user, lambda: pytest.fail("looked up")) == user


def test_owner_scope() -> None:
    assert inputs.owner_scope({"user_id": 7, "agent_id": None, "topic": "x"}, "") == Scope(user_id="7")
    with pytest.raises(MissingOwnerError, match="in filters"):
        inputs.owner_scope({}, "in filters")
