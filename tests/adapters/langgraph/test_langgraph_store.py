"""A LangGraph store over a real memory (Mem0, embedded Qdrant, MiniLM) and a fake engine."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.base import BaseStore, GetOp, PutOp, SearchOp
from langgraph_helpers import PATIENCE, QUESTION, prompt_of

from inferscale_mem import AsyncInferScaleMemory, ChatInferScale, InferScaleMemory, InferScaleStore
from inferscale_mem.adapters.langgraph.alarm import Alarm
from inferscale_mem.adapters.langgraph.items import MemoryItem
from inferscale_mem.adapters.langgraph.store import KEPT
from inferscale_mem.adapters.mem0 import store_items
from inferscale_mem.errors import ConfigError, FactError, HandleError, InputError
from inferscale_mem.testing import FakeEngine

HOME = ("memories", "alice")


@pytest.fixture
def store(memory: InferScaleMemory) -> InferScaleStore:
    return InferScaleStore(memory, namespace=("memories", "{user_id}"))


def texts(memory: InferScaleMemory) -> list[str]:
    """What models may read, oldest first."""
    return [fact.text for fact in memory.service.index.facts()]


def until(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not done() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return done()


def end_of(memory: InferScaleMemory) -> float:
    """When the only fact that has an end comes to it."""
    [end] = [f.metadata["store_expires_at"] for f in memory.service.index.facts() if "store_expires_at" in f.metadata]
    return float(end)


async def test_put_get_delete(store: InferScaleStore) -> None:
    value = {"content": "Likes tea.", "score": 5, "tags": ["a", {"b": None}]}
    store.put(HOME, "k1", value)
    item = store.get(HOME, "k1")
    assert item is not None and item.value == value and item.key == "k1" and item.namespace == HOME
    store.put(HOME, "k1", {"content": "Likes coffee."})
    again = await store.aget(HOME, "k1")
    assert again is not None and again.value == {"content": "Likes coffee."}
    assert again.created_at == item.created_at and again.updated_at >= item.updated_at
    assert store.get(HOME, "k2") is None and store.get(("memories", "bob"), "k1") is None
    await store.adelete(HOME, "k1")
    assert store.get(HOME, "k1") is None and store.search(HOME) == []


async def test_search_finds_by_meaning_and_hits_carry_handles(store: InferScaleStore, memory: InferScaleMemory) -> None:
    for key, text in (("a", "Likes tea."), ("b", "Allergic to peanuts."), ("c", "Works in Oslo.")):
        store.put(HOME, key, {"content": text})
    store.put(("memories", "bob"), "d", {"content": "Allergic to fish."})
    store.put(HOME, "hidden", {"content": "Allergic to cats."}, index=False)
    hits = store.search(HOME, query="Which allergies are there?", limit=2)
    assert hits[0].key == "b" and len(hits) == 2
    assert "hidden" not in [hit.key for hit in store.search(HOME, query="allergies", limit=10)]
    assert all(isinstance(hit, MemoryItem) and memory.resolve(hit.handle) == hit.value["content"] for hit in hits)
    assert hits[0].dict()["handle"] == hits[0].handle
    assert [hit.key for hit in await store.asearch(("memories",), query="fish", limit=1)] == ["d"]
    assert {hit.key for hit in store.search(HOME, filter={"content": {"$ne": "Likes tea."}})} == {"b", "c", "hidden"}
    assert len(store.search(HOME, limit=2, offset=3)) == 1
    with pytest.raises(InputError, match="operator"):
        store.search(HOME, filter={"content": {"$in": []}})


def test_items_put_with_index_false_are_kept_whatever_their_size_and_never_read(
    store: InferScaleStore, memory: InferScaleMemory, engine: FakeEngine
) -> None:
    value = {"content": "word " * 6000}
    with pytest.raises(
        FactError, match=r"'big' of \('memories', 'alice'\).*30\d* tokens.*index=\['field'\].*index=False"
    ):
        store.put(HOME, "big", value)
    assert store.get(HOME, "big") is None
    store.put(HOME, "part", {**value, "title": "Words."}, index=["title"])
    store.put(HOME, "big", value, index=False)
    store.put(HOME, " ", {"content": "Likes tea."}, index=False)
    assert memory.service.wait(PATIENCE)
    read = "".join(engine.tokenizer.decode(plan.token_ids) for plan in engine.encodes)
    assert "Words." in read and "word word" not in read and KEPT not in read
    item = store.get(HOME, "big")
    assert item is not None and item.value == value
    [hit] = store.search(HOME, filter={"content": value["content"], "title": None})
    assert isinstance(hit, MemoryItem) and hit.handle is None and hit.value == value
    assert [found.key for found in store.search(HOME, query="word", limit=10)] == ["part"]
    found = memory.search("An item that is kept", filters={"user_id": "alice"}, threshold=0.0)["results"]
    assert [memory.resolve(found["memory"]) for found in found] == ["Words."]
    with pytest.raises(HandleError, match="'big', which was put with index=False"):
        ChatInferScale(memory=memory).invoke("Hello.", memories=[hit])
    store.put(HOME, "big", {"content": "Likes coffee."})
    assert "Likes coffee." in texts(memory)


def test_hits_are_memories_of_a_chat_model(
    store: InferScaleStore, memory: InferScaleMemory, engine: FakeEngine
) -> None:
    store.put(HOME, "a", {"content": "Allergic to peanuts."})
    assert memory.service.wait(PATIENCE)
    chat = ChatInferScale(memory=memory)
    answer = chat.invoke("What may I not eat?", memories=store.search(HOME, query="food"), user_id="alice")
    assert answer.response_metadata["inferscale"]["facts_injected"] == 1
    assert "- Allergic to peanuts.\n" in prompt_of(engine)


def test_namespaces(memory: InferScaleMemory) -> None:
    store = InferScaleStore(memory)
    for namespace in (("docs", "a b", "x"), ("docs", "c", "x"), ("notes",)):
        store.put(namespace, "k", {"content": "Something."})
    assert store.list_namespaces() == [("docs", "a b", "x"), ("docs", "c", "x"), ("notes",)]
    assert store.list_namespaces(prefix=("docs",), max_depth=2) == [("docs", "a b"), ("docs", "c")]
    assert store.list_namespaces(suffix=("x",), limit=1, offset=1) == [("docs", "c", "x")]
    assert store.list_namespaces(prefix=("*", "c")) == [("docs", "c", "x")]


def test_namespaces_that_do_not_fit_are_refused(store: InferScaleStore, memory: InferScaleMemory) -> None:
    for namespace in (("memories",), ("other", "alice")):
        with pytest.raises(InputError, match="does not look like"):
            store.put(namespace, "k", {"content": "x"})
    with pytest.raises(ConfigError, match="names no owner"):
        InferScaleStore(memory, namespace=("memories",))
    for wrong in (5, AsyncInferScaleMemory):
        with pytest.raises(ConfigError, match=r"no InferScaleMemory; give one\. In async apps, too: .*asearch"):
            InferScaleStore(wrong)
    with pytest.raises(InputError, match="not JSON"):
        store.put(HOME, "k", {"content": object()})


def test_items_expire_and_their_handles_die(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "stays", {"content": "Likes coffee."})
    store.put(HOME, "gone", {"content": "Likes tea."}, ttl=0.15)  # nine seconds: longer than a slow machine takes
    handle = memory.service.handle(memory.service.index.facts()[-1])
    assert memory.service.resolve([handle]).facts
    assert until(lambda: not memory.service.resolve([handle]).facts), "it goes by itself"
    assert [hit.key for hit in store.search(HOME)] == ["stays"]


def test_eight_writers_lose_nothing(store: InferScaleStore) -> None:
    def write(n: int) -> None:
        for i in range(4):
            store.put(HOME, f"{n}-{i}", {"content": f"Fact {n} {i}."})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.search(HOME, limit=100)) == 32


async def test_a_graph_with_the_store(store: InferScaleStore, memory: InferScaleMemory) -> None:
    chat = ChatInferScale(memory=memory)

    def answer(state: MessagesState, *, store: BaseStore) -> dict[str, Any]:
        hits = store.search(HOME, query=str(state["messages"][-1].text), limit=3)
        return {"messages": [chat.invoke(state["messages"], memories=hits)]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile(store=store)
    store.put(HOME, "a", {"content": "Allergic to peanuts."})
    assert memory.service.wait(PATIENCE)
    config: Any = {"configurable": {"user_id": "alice"}}
    for done in (graph.invoke(QUESTION, config), await graph.ainvoke(QUESTION, config)):
        assert done["messages"][-1].response_metadata["inferscale"]["facts_injected"] == 1
    other: Any = {"configurable": {"user_id": "bob"}}
    done = graph.invoke(QUESTION, other)
    assert done["messages"][-1].response_metadata["inferscale"]["facts_injected"] == 0


# Items that end.


def test_reading_moves_the_end_and_nothing_else(
    store: InferScaleStore, memory: InferScaleMemory, engine: FakeEngine
) -> None:
    store.put(HOME, "k", {"content": "Allergic to peanuts."}, ttl=60)
    assert memory.service.wait(PATIENCE)
    [first] = store.search(HOME, refresh_ttl=False)
    [fact], end, encoded = memory.service.index.facts(), end_of(memory), engine.status().counters["encoded"]
    assert store.get(HOME, "k", refresh_ttl=False) is not None and end_of(memory) == end
    for read in (lambda: store.get(HOME, "k"), lambda: store.search(HOME), lambda: store.search(HOME, query="food")):
        before = end_of(memory)
        assert read() and end_of(memory) > before
        [hit] = store.search(HOME)
        assert isinstance(first, MemoryItem) and isinstance(hit, MemoryItem) and hit.handle == first.handle
        for hits in ([first], [hit]):
            answer = ChatInferScale(memory=memory).invoke("What may I not eat?", memories=hits)
            assert answer.response_metadata["inferscale"]["facts_injected"] == 1
    [after] = memory.service.index.facts()
    assert (after.id, after.revision) == (fact.id, fact.revision)
    assert memory.service.wait(PATIENCE) and engine.status().counters["encoded"] == encoded
    assert [line["event"] for line in memory.history(fact.id)] == ["ADD"]
    assert memory.search("food", filters={"user_id": "alice"}, threshold=0.0)["results"][0]["id"] == fact.id


def test_what_was_read_outlives_a_new_process(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "k", {"content": "Likes tea."}, ttl=60)
    store.get(HOME, "k")
    end = end_of(memory)
    memory.close()
    with InferScaleMemory(engine=FakeEngine()) as reopened:
        assert end_of(reopened) == end


@pytest.mark.parametrize("index", [["public"], ("public",), ["public", ""], ["nowhere"], []])
def test_fields_that_were_not_named_never_reach_the_model(
    store: InferScaleStore, memory: InferScaleMemory, index: Any
) -> None:
    shown = "likes tea" if "public" in index else "k"
    store.put(HOME, "k", {"public": "likes tea", "secret": "pin 9921"}, index=index, ttl=5)
    for _ in range(2):
        assert texts(memory) == [shown]
        assert store.get(HOME, "k") is not None and store.search(HOME)
    assert [hit.key for hit in store.search(HOME, query="tea")] == (["k"] if "public" in index else [])


def test_a_short_life_ends_in_time_beside_a_long_one(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "long", {"content": "Likes tea."}, ttl=60)
    store.put(HOME, "short", {"content": "Likes coffee."}, ttl=0.02)
    assert until(lambda: texts(memory) == ["Likes tea."])


def test_what_an_earlier_store_left_ends_too(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "k", {"content": "Likes tea."}, ttl=60)
    store_items.set_end(memory, memory.service.index.facts()[0].id, time.time() - 1)
    assert store.get(HOME, "k") is None and texts(memory) == ["Likes tea."]  # the first one waits for its alarm
    InferScaleStore(memory, namespace=("memories", "{user_id}")).list_namespaces()
    assert texts(memory) == []


def test_an_alarm_rings_at_the_earliest_time() -> None:
    class Sleeper:
        def __init__(self) -> None:
            self.woken = threading.Event()
            self.alarm = Alarm(self.wake)

        def wake(self) -> None:
            self.woken.set()

    sleeper = Sleeper()
    for at in (1e300, time.time() + 3600, time.time() + 7200):
        sleeper.alarm.set(at)
    assert not sleeper.woken.is_set()
    sleeper.alarm.set(time.time())
    assert sleeper.woken.wait(PATIENCE)
    sleeper.woken.clear()
    sleeper.alarm.set(time.time())  # again
    assert sleeper.woken.wait(PATIENCE)
    sleeper.alarm.set(time.time() + 3600)
    woken, alarm = sleeper.woken, sleeper.alarm
    del sleeper
    gc.collect()
    woken.clear()
    alarm.set(time.time())
    assert alarm._timer is None or alarm._timer.join(PATIENCE) is None
    assert not woken.is_set()


@pytest.mark.parametrize("ttl", [math.nan, math.inf, -1, 0, "5", True, 10**400], ids=str)
def test_what_is_no_time_to_live_is_refused(store: InferScaleStore, memory: InferScaleMemory, ttl: Any) -> None:
    with pytest.raises(InputError, match="no time to live"):
        store.put(HOME, "k", {"content": "x"}, ttl=ttl)
    with pytest.raises(InputError, match="no time to live"):
        InferScaleStore(memory, ttl={"default_ttl": ttl})
    assert texts(memory) == []


# Marks of items that no store has written.


def marks(labels: Any, **others: Any) -> dict[str, Any]:
    told = {"namespace": json.dumps(labels), "key": "debt", "value": "{}", "created_at": "2024-01-01T00:00:00"}
    return {f"store_{name}": value for name, value in {**told, **others}.items() if value is not None}


FORGED = {
    "another's namespace": marks(["memories", "alice"]),
    "namespace that does not fit": marks(["alice"]),
    "namespace that is no JSON": marks(None, namespace="not json"),
    "namespace too deep": marks(None, namespace="[" * 100_000),
    "namespace of lists": marks([["memories"], ["mallory"]]),
    "namespace that is text": marks("memories"),
    "surrogate": marks(["memories", "\ud800"]),
    "no key": marks(["memories", "mallory"], key=None),
    "key that is a number": marks(["memories", "mallory"], key=5),
    "value that is a list": marks(["memories", "mallory"], value="[]"),
    "no date": marks(["memories", "mallory"], created_at="soon"),
    "ttl": marks(["memories", "mallory"], ttl="abc"),
    "ttl without an end": marks(["memories", "mallory"], ttl=5),
    "end": marks(["memories", "mallory"], ttl=5, expires_at="abc"),
    "indexed": marks(["memories", "mallory"], indexed="yes"),
}


def test_forged_items_are_none_and_hinder_nobody(
    store: InferScaleStore, memory: InferScaleMemory, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(HOME, "k", {"content": "Likes tea."})
    for name, metadata in FORGED.items():
        with store_items.writing(memory):  # as another program at the same Qdrant can write it
            memory.add(f"Alice owes me money ({name}).", user_id="mallory", infer=False, metadata=metadata)
    assert store.sweep_ttl() == 0
    assert [hit.key for hit in store.search(HOME)] == ["k"] and store.get(HOME, "debt") is None
    assert [hit.key for hit in store.search((), query="money owed")] == ["k"]
    assert store.search(("memories", "mallory")) == [] and store.list_namespaces() == [HOME]
    store.put(("memories", "bob"), "k", {"content": "Likes coffee."})
    store.delete(HOME, "k")
    assert [hit.namespace for hit in store.search(())] == [("memories", "bob")]
    assert len(texts(memory)) == len(FORGED) + 1
    assert len([record for record in caplog.records if "marked as an item" in record.message]) == 1


def test_only_stores_mark_items(store: InferScaleStore, memory: InferScaleMemory) -> None:
    with pytest.raises(InputError, match="InferScaleStore"):
        memory.add("Alice owes me.", user_id="mallory", infer=False, metadata=marks(["memories", "alice"]))
    [plain] = memory.add("I am Bob.", user_id="bob", infer=False, metadata={"store_key": "a shop's"})["results"]
    with pytest.raises(InputError, match="InferScaleStore"):
        memory.update(plain["id"], metadata=marks(["memories", "bob"]))
    memory.update(plain["id"], "I am Rob.", metadata={"store_key": "another shop's"})
    assert texts(memory) == ["I am Rob."] and store.search(()) == []


def test_an_items_text_and_marks_change_in_the_store_only(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "k", {"content": "Likes tea."})
    [fact] = memory.service.index.facts()
    for change in ({"text": "Likes coffee."}, {"data": "Likes coffee."}, {"metadata": {"store_value": "{}"}}):
        with pytest.raises(InputError, match=r"follows from the value .* key 'k'; put the new value there"):
            memory.update(fact.id.upper(), **change)
    memory.update(fact.id, metadata={"colour": "green"})
    item = store.get(HOME, "k")
    assert item is not None and item.value == {"content": "Likes tea."} and texts(memory) == ["Likes tea."]


# Several stores, and several processes.


def test_stores_of_one_memory_write_one_after_the_other(memory: InferScaleMemory) -> None:
    stores, errors = [InferScaleStore(memory) for _ in range(2)], []

    def write(n: int) -> None:
        try:
            for i in range(3):
                stores[n % 2].put(("cc",), "k", {"content": f"{n} {i}"}, ttl=60)
                stores[n % 2].search(("cc",))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(texts(memory)) == 1 and len(stores[0].search(("cc",))) == 1
    stores[1].delete(("cc",), "k")
    assert texts(memory) == []


@pytest.mark.parametrize("how", ["delete", "put", "expire"])
def test_copies_that_other_processes_left(store: InferScaleStore, memory: InferScaleMemory, how: str) -> None:
    store.put(HOME, "other", {"content": "Likes cake."})
    for content in ("Likes tea.", "Likes coffee.", "Likes milk."):
        with store_items.writing(memory):
            metadata = marks(HOME, key="k", value=json.dumps({"content": content}), ttl=60, expires_at=1e10)
            [done] = memory.add(content, user_id="alice", infer=False, metadata=metadata)["results"]
    item = store.get(HOME, "k")
    assert item is not None and item.value == {"content": "Likes milk."}
    assert sorted(hit.value["content"] for hit in store.search(HOME)) == ["Likes cake.", "Likes milk."]
    if how == "delete":
        store.delete(HOME, "k")
    elif how == "put":
        store.put(HOME, "k", {"content": "Likes water."})
    else:
        store_items.set_end(memory, done["id"], time.time() - 1)
        assert store.get(HOME, "k") is None and store.sweep_ttl() == 1
    assert texts(memory) == ["Likes cake.", *(["Likes water."] if how == "put" else [])]


def test_one_that_is_deleted_meanwhile_is_gone(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "k", {"content": "Likes tea."}, ttl=60)
    rows = store._rows()
    memory.delete(rows[0].fact.id)
    store._delete(rows)
    store._renew(rows)
    assert store.search(HOME) == [] and texts(memory) == []


# What cannot be used.


@pytest.mark.parametrize(
    "label", ["alice ", " alice", "alice\n", "al ice", "\u2003alice", "*", "alice\ud800", 5], ids=ascii
)
def test_no_two_namespaces_are_one_owner(store: InferScaleStore, memory: InferScaleMemory, label: Any) -> None:
    store.put(HOME, "k", {"content": "Likes tea."})
    with pytest.raises(InputError):
        store.batch([PutOp(("memories", label), "k", {"content": "Likes coffee."})])
    with pytest.raises(InputError):
        store.batch([GetOp(("memories", label), "k")])
    assert store.batch([SearchOp(("memories", label))]) == [[]] and texts(memory) == ["Likes tea."]


def test_each_namespace_is_an_owner_of_its_own_by_default(memory: InferScaleMemory) -> None:
    store = InferScaleStore(memory)
    namespaces = [("a", "b"), ("a/b",), ("a%2Fb",), (" a", "b"), ("a ", "b"), ("a", "b\n"), ("*",)]
    for namespace in namespaces:
        store.put(namespace, "k", {"content": ascii(namespace)})
    assert len({fact.scope for fact in memory.service.index.facts()}) == len(namespaces)
    assert all((item := store.get(n, "k")) is not None and item.value == {"content": ascii(n)} for n in namespaces)
    with pytest.raises(InputError, match="surrogates"):
        store.put(("a\ud800",), "k", {"content": "x"})
    with pytest.raises(ConfigError, match="twice"):
        InferScaleStore(memory, namespace=("{user_id}", "{user_id}"))


@pytest.mark.parametrize("value", [["a"], "abc", 5, {1: "a"}, {"a": {1}}, {"a": "\ud800"}], ids=ascii)
def test_values_that_are_no_dict_of_json_are_refused(
    store: InferScaleStore, memory: InferScaleMemory, value: Any
) -> None:
    store.put(HOME, "k", {"content": "Likes tea."})
    with pytest.raises(InputError):
        store.put(HOME, "k", value)
    assert texts(memory) == ["Likes tea."]


def test_questions_that_do_not_fit(store: InferScaleStore, memory: InferScaleMemory) -> None:
    for key, value in (("a", 1), ("b", "x"), ("c", None), ("d", [1])):
        store.put(HOME, key, {"a": value})
    for operator, number, text in (("$gt", [], []), ("$gte", ["a"], ["b"]), ("$lt", [], []), ("$lte", ["a"], ["b"])):
        for operand, found in ((1, number), ("x", text)):
            assert [hit.key for hit in store.search(HOME, filter={"a": {operator: operand}})] == found
    assert len(store.search(HOME, query=" ")) == 4
    for wrong in ({"filter": "x"}, {"filter": {"a": {"$in": []}}}, {"query": "\ud800"}):
        with pytest.raises(InputError):
            store.search(HOME, **wrong)
    for index in ("a", True, [5]):
        with pytest.raises(InputError, match="list of paths"):
            store.put(HOME, "a", {"a": 1}, index=index)
    with pytest.raises(InputError, match="list of paths"):
        InferScaleStore(memory, fields="content")
