"""InferScaleMemory as an app sees it: what goes in, what comes out, and what becomes of records."""

from __future__ import annotations

import gc
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import mem0
import pytest
from mem0.embeddings.base import EmbeddingBase
from mem0.llms.base import LLMBase
from mem0.memory.base import MemoryBase
from mem0.memory.storage import SQLiteManager
from mem0.memory.telemetry import MEM0_TELEMETRY
from mem0.vector_stores.base import VectorStoreBase
from mem0_helpers import keeps

from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.errors import InputError, ScopeError, StoreError, StoreLockedError
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Scope

HANDLE = re.compile(r"ism1\.[0-9a-z]{16}\.[0-9a-z]{16}")
ALICE = {"user_id": "alice"}


def add(memory: Any, text: str, user: str = "alice", **kwargs: Any) -> str:
    """Add one fact; returns its id."""
    return memory.add(text, user_id=user, infer=False, **kwargs)["results"][0]["id"]


def one(memory: Any, query: str, user: str = "alice", **kwargs: Any) -> str:
    """The first hit's memory."""
    return memory.search(query, filters={"user_id": user}, **kwargs)["results"][0]["memory"]


def records(memory: Any) -> set[str]:
    """Handles that have a record in the engine, after all encoding is done."""
    assert memory.service.wait(30)
    directory = memory.service.engine._directory
    return {record.handle for record in directory._ready.values() if record.handle}


# Signatures.

PROPERTIES = {"project", "entity_store"}
SURFACE = PROPERTIES | {"add", "chat", "close", "delete", "delete_all", "from_config", "get", "get_all", "history"}
SURFACE |= {"reset", "search", "update"}
CONTEXT = {mem0.Memory: ["__enter__", "__exit__"], mem0.AsyncMemory: ["__aenter__", "__aexit__"]}
EXTRAS = {"__init__": {"inferscale", "engine"}, "from_config": {"engine"}, "search": {"memory_format"}}


@pytest.mark.parametrize("kind, parent", [(InferScaleMemory, mem0.Memory), (AsyncInferScaleMemory, mem0.AsyncMemory)])
def test_signatures_are_the_parents_and_keyword_only_extras(kind: type, parent: type) -> None:
    public = {name for name in dir(parent) if not name.startswith("_")}
    assert public == SURFACE, "Mem0's surface has changed: what is new there has to be followed here"
    assert {name for name in public if isinstance(inspect.getattr_static(parent, name), property)} == PROPERTIES
    for name in [*sorted(public - PROPERTIES), "__init__", *CONTEXT[parent]]:
        theirs, ours = inspect.signature(getattr(parent, name)), inspect.signature(getattr(kind, name))
        extras = set(ours.parameters) - set(theirs.parameters)
        assert extras == EXTRAS.get(name, set()), name
        assert all(ours.parameters[extra].kind is inspect.Parameter.KEYWORD_ONLY for extra in extras), name
        # Mem0's default configuration asks a cloud; ours is None, for all local.
        parameters = [
            [(p.name, p.kind, None if p.name == "config" else p.default) for p in signature.parameters.values()]
            for signature in (theirs, ours)
        ]
        assert [p for p in parameters[1] if p[0] not in extras] == parameters[0], name
        assert inspect.iscoroutinefunction(getattr(kind, name)) == inspect.iscoroutinefunction(getattr(parent, name))


def test_what_others_look_at(memory: InferScaleMemory) -> None:
    """Mem0's proxy and CrewAI: the class. LlamaIndex: the class, and the version of the API."""
    assert isinstance(memory, mem0.Memory) and not isinstance(memory, mem0.MemoryClient)
    assert issubclass(AsyncInferScaleMemory, mem0.AsyncMemory) and isinstance(memory, MemoryBase)
    assert memory.api_version == "v1.1" and isinstance(memory.db, SQLiteManager)
    assert isinstance(memory.vector_store, VectorStoreBase) and isinstance(memory.embedding_model, EmbeddingBase)
    assert isinstance(memory.llm, LLMBase) and memory.collection_name == "mem0"


def test_telemetry_is_off() -> None:
    assert MEM0_TELEMETRY is False


# Search and resolve.


def test_search_gives_handles_and_everything_else_as_mem0_does(memory: InferScaleMemory) -> None:
    add(memory, "I'm allergic to peanuts.", metadata={"source": "chat"})
    with_handles = memory.search("What may I not eat?", filters=ALICE, top_k=5)
    with_text = memory.search("What may I not eat?", filters=ALICE, top_k=5, memory_format="text")
    handle = with_handles["results"][0].pop("memory")
    assert type(handle) is str and HANDLE.fullmatch(handle)
    assert with_text["results"][0].pop("memory") == "I'm allergic to peanuts."
    assert with_handles == with_text
    assert with_text["results"][0]["metadata"] == {"source": "chat"}


def test_only_search_gives_handles(memory: InferScaleMemory) -> None:
    fact = add(memory, "I live in Lyon.")
    assert memory.get(fact)["memory"] == "I live in Lyon."
    assert [item["memory"] for item in memory.get_all(filters=ALICE)["results"]] == ["I live in Lyon."]
    assert [change["new_memory"] for change in memory.history(fact)] == ["I live in Lyon."]


def test_rerankers_see_text(memory: InferScaleMemory) -> None:
    seen = []

    class Reranker:
        def rerank(self, query: str, documents: list[dict[str, Any]], top_k: int) -> list[dict[str, Any]]:
            seen.extend(document["memory"] for document in documents)
            return documents[::-1]

    memory.reranker = Reranker()
    add(memory, "I play the violin.")
    add(memory, "I play the piano.")
    plain = memory.search("instruments I play", filters=ALICE)
    reranked = memory.search("instruments I play", filters=ALICE, rerank=True)
    assert sorted(seen) == ["I play the piano.", "I play the violin."]
    assert [hit["memory"] for hit in reranked["results"]] == [hit["memory"] for hit in plain["results"]][::-1]
    assert all(HANDLE.fullmatch(hit["memory"]) for hit in reranked["results"])


def test_resolve_takes_whatever_handles_are_in(memory: InferScaleMemory) -> None:
    add(memory, "I'm allergic to peanuts.")
    hits = memory.search("peanuts", filters=ALICE)
    handle = hits["results"][0]["memory"]
    text = "I'm allergic to peanuts."
    resolved = memory.resolve(hits)
    assert resolved["results"][0]["memory"] == text
    assert {**resolved["results"][0], "memory": handle} == hits["results"][0]
    assert hits["results"][0]["memory"] == handle, "the argument is not changed"
    assert memory.resolve(handle) == text
    assert memory.resolve([handle, "no handle", (handle,)]) == [text, "no handle", (text,)]
    assert memory.resolve(f"Memories:\n- {handle}\n- {handle}") == f"Memories:\n- {text}\n- {text}"
    assert memory.resolve(None) is None


def test_resolve_leaves_what_it_does_not_know(memory: InferScaleMemory) -> None:
    add(memory, "I'm allergic to peanuts.")
    handle = one(memory, "peanuts")
    forged = handle[:-1] + ("0" if handle[-1] != "0" else "1")
    nobodys = "ism1.0000000000000000.0000000000000000"
    assert memory.resolve(f"{forged} {nobodys}") == f"{forged} {nobodys}"
    assert memory.resolve(handle, filters={"user_id": "bob"}) == handle
    assert memory.resolve(handle, filters=ALICE) == "I'm allergic to peanuts."


def test_unknown_format_is_refused(memory: InferScaleMemory) -> None:
    with pytest.raises(InputError, match="memory_format='texts'"):
        memory.search("x", filters=ALICE, memory_format="texts")


# Owners.


def test_results_of_other_owners_are_left_out(memory: InferScaleMemory) -> None:
    """Mem0's filters let operators override the owner."""
    add(memory, "I have a red car.", "alice")
    add(memory, "I have a blue car.", "bob")
    leaky = {"user_id": "alice", "AND": [{"user_id": "bob"}]}
    found = mem0.Memory.search(memory, "Which car do I have?", filters=leaky)
    assert [hit["user_id"] for hit in found["results"]] == ["bob"], "Mem0 leaks here, or this test shows nothing"
    assert memory.search("Which car do I have?", filters=leaky)["results"] == []
    assert memory.search("Which car do I have?", filters=leaky, memory_format="text")["results"] == []


@pytest.mark.parametrize("owners", [{"user_id": "*"}, {"user_id": "alice", "run_id": " * "}])
def test_wildcards_are_refused(memory: InferScaleMemory, owners: dict[str, str]) -> None:
    add(memory, "I have a red car.")
    calls = [
        lambda: memory.add("x", infer=False, **owners),
        lambda: memory.search("car", filters=owners),
        lambda: memory.get_all(filters=owners),
        lambda: memory.delete_all(**owners),
        lambda: memory.resolve("x", filters=owners),
    ]
    for call in calls:
        with pytest.raises(ScopeError):
            call()
    assert len(memory.get_all(filters=ALICE)["results"]) == 1


def test_search_takes_numbers_and_spaces_around_ids_as_mem0_does(memory: InferScaleMemory) -> None:
    memory.add("I have a red car.", user_id=7, infer=False)
    assert (
        memory.resolve(memory.search("car", filters={"user_id": " 7 "}))["results"][0]["memory"] == "I have a red car."
    )


def test_a_wider_request_sees_facts_of_its_runs(memory: InferScaleMemory) -> None:
    memory.add("I have a red car.", user_id="alice", run_id="r1", infer=False)
    memory.add("I have a blue bike.", user_id="alice", run_id="r2", infer=False)
    found = memory.resolve(memory.search("vehicles I have", filters=ALICE))
    assert sorted(hit["memory"] for hit in found["results"]) == ["I have a blue bike.", "I have a red car."]
    found = memory.resolve(memory.search("vehicles I have", filters={**ALICE, "run_id": "r1"}))
    assert [hit["memory"] for hit in found["results"]] == ["I have a red car."]


# What becomes of records.


def test_a_fact_that_is_told_again_is_not_encoded_behind_the_first_telling(memory: InferScaleMemory) -> None:
    """It would be copied from there, and its record would lack what it says whenever it is served alone."""
    told = ("I live in Lisbon.", "My dog is Rex.", "My dog is called Rex.")
    for text in told:
        add(memory, text)
        assert memory.service.wait(20)
    planner = memory.service.planner
    behind = [segment.token_ids for segment in memory.service.engine.encodes[-1].segments]
    assert behind[-1] == planner.fact_tokens(told[2])
    assert planner.fact_tokens(told[0]) in behind and planner.fact_tokens(told[1]) not in behind


def test_every_stored_fact_gets_a_record(memory: InferScaleMemory) -> None:
    for text in ("I live in Lyon.", "I have two cats.", "I work at night."):
        add(memory, text)
    handles = {hit["memory"] for hit in memory.search("me", filters=ALICE, threshold=0.0)["results"]}
    assert len(handles) == 3
    assert records(memory) == handles


@pytest.mark.parametrize("infer", [True, False])
def test_every_way_to_be_born_ends_in_a_record(open_memory: Any, infer: bool) -> None:
    engine = FakeEngine(answers=keeps("Lyon", "cats"))
    memory = open_memory(engine=engine)
    memory.add([{"role": "user", "content": "I live in Lyon. I have two cats."}], infer=infer, **ALICE)
    handles = {hit["memory"] for hit in memory.search("me", filters=ALICE, threshold=0.0)["results"]}
    assert len(handles) == (2 if infer else 1) and records(memory) == handles
    memory.close()
    engine.close()


def test_the_owner_who_was_here_last_is_encoded_first_after_a_start(open_memory: Any) -> None:
    with open_memory() as memory:
        for user in ("alice", "bob", "carol"):
            add(memory, f"My name is {user}.", user)
        memory._core.turns._used.clear()  # as if that had been long ago
        memory.search("name", filters={"user_id": "alice"}, memory_format="text")
    engine = FakeEngine()
    again = open_memory(engine=engine)
    assert again.service.wait(30)
    encoded = [engine.tokenizer.decode(plan.token_ids) for plan in engine.encodes if plan.spans[-1].handle]
    assert [re.findall(r"name is (\w+)", prompt)[-1] for prompt in encoded] == ["alice", "carol", "bob"]
    again.close()
    engine.close()


def test_procedural_memory_gets_a_record(open_memory: Any) -> None:
    engine = FakeEngine(answers="1. Opened the door. 2. Went in.", max_model_len=20_000)  # Mem0 asks at length
    memory = open_memory(engine=engine)
    conversation = [{"role": "user", "content": "Open the door."}, {"role": "assistant", "content": "Done."}]
    result = memory.add(conversation, agent_id="robot", memory_type="procedural_memory")
    assert result["results"][0]["memory"].startswith("1. Opened the door.")
    assert len(records(memory)) == 1
    memory.close()
    engine.close()


def test_update_makes_a_new_revision(memory: InferScaleMemory) -> None:
    fact = add(memory, "My favourite player is Ronaldo.")
    old = one(memory, "favourite player")
    assert records(memory) == {old}
    memory.update(fact, "My favourite player is Messi.")
    new = one(memory, "favourite player")
    assert new != old
    assert records(memory) == {new}
    assert memory.resolve(old) == old
    assert memory.resolve(new) == "My favourite player is Messi."
    assert memory.service.resolve([old, new], Scope(user_id="alice")).facts.keys() == {new}


def test_update_of_metadata_makes_a_new_revision(memory: InferScaleMemory) -> None:
    fact = add(memory, "I live in Lyon.")
    old = one(memory, "where I live")
    memory.update(fact, metadata={"checked": True})
    new = one(memory, "where I live")
    assert new != old and memory.resolve(new) == "I live in Lyon."
    assert records(memory) == {new}


def test_delete_kills_record_and_handle(memory: InferScaleMemory) -> None:
    fact = add(memory, "I live in Lyon.")
    handle = one(memory, "where I live")
    assert records(memory) == {handle}
    memory.delete(fact)
    assert records(memory) == set()
    assert memory.resolve(handle) == handle


def test_delete_all_touches_one_owner(memory: InferScaleMemory) -> None:
    for user in ("alice", "bob"):
        add(memory, f"My name is {user}.", user)
        add(memory, f"Call me {user}.", user)
    kept = {hit["memory"] for hit in memory.search("name", filters={"user_id": "bob"}, threshold=0.0)["results"]}
    assert len(kept) == 2
    memory.delete_all(user_id="alice")
    assert memory.get_all(filters=ALICE)["results"] == []
    assert records(memory) == kept


def test_reset_kills_everything(memory: InferScaleMemory) -> None:
    add(memory, "I live in Lyon.")
    handle = one(memory, "where I live")
    assert records(memory) == {handle}
    memory.reset()
    assert records(memory) == set() and memory.resolve(handle) == handle
    add(memory, "I live in Oslo.")
    assert memory.resolve(one(memory, "where I live")) == "I live in Oslo."
    assert len(records(memory)) == 1


def test_expired_facts_are_dead(memory: InferScaleMemory) -> None:
    add(memory, "I live in Lyon.")
    fact = add(memory, "I am on holiday.")
    handle = one(memory, "holiday")
    assert handle in records(memory)
    memory.update(fact, expiration_date="2020-01-01")
    assert [hit["id"] for hit in memory.search("holiday", filters=ALICE, threshold=0.0)["results"]] != [fact]
    shown = one(memory, "holiday", show_expired=True)
    assert HANDLE.fullmatch(shown) and memory.resolve(shown) == shown
    assert len(records(memory)) == 1
    memory.update(fact, expiration_date=None)
    assert memory.resolve(one(memory, "holiday")) == "I am on holiday."


def test_facts_that_expire_while_the_memory_is_open_lose_their_records(
    memory: InferScaleMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(memory, "I am on holiday.", expiration_date="2999-12-31")
    handle = one(memory, "holiday")
    assert records(memory) == {handle}
    monkeypatch.setattr("inferscale_mem.adapters.mem0.index.expired", lambda last_day: last_day is not None)
    memory.search("anything", filters=ALICE)
    assert records(memory) == set()
    assert memory.resolve(handle) == handle


# Opening and closing.


def test_close_and_open_again(open_memory: Any, home: Path) -> None:
    with open_memory() as memory:
        add(memory, "I live in Lyon.")
        handle = one(memory, "where I live")
    memory.close()
    again = open_memory()
    assert again.resolve(handle) == "I live in Lyon."
    assert one(again, "where I live") == handle
    assert records(again) == {handle}, "records are made again, in the background"
    passing = (".db-wal", ".db-shm", ".writing")
    made = {path.name for path in (home / "inferscale").iterdir() if path.suffix not in passing}
    assert made == {"qdrant", "history.db", "handle.key", "turns-qdrant-mem0.db"}


def test_a_closed_memory_says_so(memory: InferScaleMemory) -> None:
    fact = add(memory, "I live in Lyon.")
    memory.close()
    calls = [
        lambda: add(memory, "x"),
        lambda: memory.search("x", filters=ALICE),
        lambda: memory.get(fact),
        lambda: memory.get_all(filters=ALICE),
        lambda: memory.update(fact, "x"),
        lambda: memory.delete(fact),
        lambda: memory.delete_all(**ALICE),
        lambda: memory.history(fact),
        lambda: memory.reset(),
        lambda: memory.resolve("x"),
        lambda: memory.service,
    ]
    for call in calls:
        with pytest.raises(StoreError, match="closed"):
            call()


def test_a_store_in_use_is_named(open_memory: Any, home: Path) -> None:
    open_memory()
    with pytest.raises(StoreLockedError, match=re.escape(str(home / "inferscale" / "qdrant"))):
        open_memory()


def test_a_memory_that_is_dropped_lets_go_of_its_store(engine: FakeEngine) -> None:
    """As Mem0's, without waiting for the garbage collector: its proxy's own tests open one after the other."""
    gc.disable()
    try:
        for _ in range(3):
            add(InferScaleMemory(engine=engine), "I live in Lyon.")
        with InferScaleMemory(engine=engine) as memory:
            assert len(memory.get_all(filters=ALICE)["results"]) == 3
    finally:
        gc.enable()


def test_a_given_engine_is_not_closed(open_memory: Any, engine: FakeEngine) -> None:
    memory = open_memory()
    add(memory, "I live in Lyon.")
    assert memory.service.wait(60)
    memory.close()
    assert engine.status().records > 0


def test_listing_never_starts_the_engine(open_memory: Any) -> None:
    """Not even one that cannot be started."""
    memory = open_memory(engine=None, inferscale={"engine": {"kind": "transformers"}, "model": None})
    assert memory.get_all(filters=ALICE) == {"results": []}
    assert memory.search("hello", filters=ALICE, memory_format="text") == {"results": []}
    assert memory.resolve("hello") == "hello"
    memory.delete_all(**ALICE)
    assert memory._core._opening is None


def test_a_broken_engine_shows_before_anything_is_stored(open_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("inferscale_mem.adapters.mem0.adapter.open_engine", fail)
    memory = open_memory(engine=None)
    for _ in range(2):
        with pytest.raises(OSError, match="no such device"):
            add(memory, "I live in Lyon.")
    assert memory.get_all(filters=ALICE) == {"results": []}
    assert memory.search("Lyon", filters=ALICE) == {"results": []}


def test_the_memory_opens_its_engine_once_and_closes_it(open_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FakeEngine] = []
    monkeypatch.setattr(
        "inferscale_mem.adapters.mem0.adapter.open_engine", lambda *args: opened.append(FakeEngine()) or opened[-1]
    )
    memory = open_memory(engine=None)
    threads = [threading.Thread(target=lambda: memory.service) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.close()
    assert len(opened) == 1 and opened[0]._closed


def test_entities_share_the_store(memory: InferScaleMemory) -> None:
    """Mem0 keeps them in a second collection of the same embedded Qdrant; it must not want a second lock."""
    vector = memory.embedding_model.embed("Lyon")
    memory.entity_store.insert(vectors=[vector], ids=["0" * 32], payloads=[{"data": "Lyon", **ALICE}])
    assert [row.payload["data"] for row in memory.entity_store.list(filters=ALICE)[0]] == ["Lyon"]
    assert memory.service.index.facts() == []
    memory.reset()
    assert memory.entity_store.list(filters=ALICE)[0] == []


@pytest.mark.parametrize("filters", ["alice", [("user_id", "alice")], 7])
def test_filters_that_are_no_dict_are_said_so(memory: InferScaleMemory, filters: Any) -> None:
    for ask in (lambda: memory.search("q", filters=filters), lambda: memory.get_all(filters=filters)):
        with pytest.raises(InputError, match="filters must be a dict"):
            ask()


def test_any_number_of_hits_may_be_asked_for(memory: InferScaleMemory) -> None:
    add(memory, "I am allergic to peanuts.")
    assert len(memory.search("peanuts", filters=ALICE, top_k=10**20)["results"]) == 1
    assert len(memory.get_all(filters=ALICE, top_k=10**20)["results"]) == 1
