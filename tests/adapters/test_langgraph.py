"""Agents, stores and retrievers over a real memory (Mem0, embedded Qdrant, MiniLM) and a fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.base import BaseStore

from inferscale_mem import (
    AsyncInferScaleMemory,
    ChatInferScale,
    InferScaleMemory,
    InferScaleMemoryMiddleware,
    InferScaleRetriever,
    InferScaleStore,
)
from inferscale_mem.adapters.langgraph.items import MemoryItem
from inferscale_mem.errors import ConfigError, InputError, ScopeError
from inferscale_mem.testing import FakeEngine

QUESTION = {"messages": [HumanMessage("What may I not eat?")]}
PATIENCE = 20


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine("Peanuts.")
    yield engine
    engine.close()


@pytest.fixture
def memory(engine: FakeEngine) -> Iterator[InferScaleMemory]:
    made = InferScaleMemory(engine=engine)
    yield made
    made.close()


@pytest.fixture
def known(memory: InferScaleMemory) -> InferScaleMemory:
    """A memory that knows something of two people."""
    memory.add("I am allergic to peanuts.", user_id="alice", infer=False)
    memory.add("I may not eat fish.", user_id="bob", infer=False)
    assert memory.service.wait(PATIENCE)
    return memory


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1][0].token_ids)


# Owners in the config of a call, in an agent or not.


OWNED = {
    "configurable": {"configurable": {"user_id": "alice"}},
    "metadata": {"metadata": {"user_id": "alice"}},
    "inferscale": {"configurable": {"inferscale": {"scope": {"user_id": "alice"}}}},
    "metadata inferscale": {"metadata": {"inferscale": {"user_id": "alice"}}},
}


@pytest.mark.parametrize("config", OWNED.values(), ids=OWNED)
async def test_another_owners_handles_are_refused_however_the_model_is_called(
    known: InferScaleMemory, engine: FakeEngine, config: Any
) -> None:
    hits = known.search("What may I eat?", filters={"user_id": "bob"})
    asked, chat = [HumanMessage("What may I eat?")], ChatInferScale(memory=known).bind(memories=hits)
    chunks = [list(chat.stream(asked, config)), [chunk async for chunk in chat.astream(asked, config)]]
    answers = [chat.invoke(asked, config), await chat.ainvoke(asked, config), *chat.batch([asked], config)]
    answers += [*await chat.abatch([asked], config), chat.with_config(config).invoke(asked)]
    answers += [sum(pieces[1:], start=pieces[0]) for pieces in chunks]
    for answer in answers:
        report = answer.response_metadata["inferscale"]
        assert (report["facts_requested"], report["facts_injected"]) == (1, 0)
        assert report["missed"][0]["reason"] == "belongs to another owner"
    prompts = [engine.tokenizer.decode(plan.token_ids) for plan, _ in engine.requests]
    assert len(prompts) >= len(answers) and not any("fish" in prompt for prompt in prompts)


# The middleware.


@dataclass
class Context:
    user_id: str


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "configurable": lambda: {"config": {"configurable": {"user_id": "alice"}}},
    "metadata": lambda: {"config": {"metadata": {"user_id": "alice"}}},
    "inferscale": lambda: {"config": {"configurable": {"inferscale": {"scope": {"user_id": "alice"}}}}},
    "context": lambda: {"context": Context("alice")},
    "constructor": dict,
}


@pytest.mark.parametrize("way", WAYS)
async def test_an_agent_recalls_the_runs_own_user(known: InferScaleMemory, engine: FakeEngine, way: str) -> None:
    own = {"user_id": "alice"} if way == "constructor" else {"user_id": "bob"}
    agent = create_agent(
        ChatInferScale(memory=known), middleware=[InferScaleMemoryMiddleware(known, **own)], context_schema=Context
    )
    for answer in (agent.invoke(QUESTION, **WAYS[way]()), await agent.ainvoke(QUESTION, **WAYS[way]())):
        said = answer["messages"][-1]
        assert said.response_metadata["inferscale"]["facts_injected"] == 1
        assert "peanuts" in prompt_of(engine) and "fish" not in prompt_of(engine) and "ism1" not in prompt_of(engine)


async def test_an_agent_with_tools_recalls_before_each_call() -> None:
    @tool
    def look_up(what: str) -> str:
        """Look something up."""
        return f"{what}: nothing."

    call = '<tool_call>{"name": "look_up", "arguments": {"what": "food"}}</tool_call>'
    engine = FakeEngine([call, "Peanuts.", call, "Peanuts."])
    with InferScaleMemory(engine=engine, inferscale={"home": "~/other"}) as memory:
        memory.add("I am allergic to peanuts.", user_id="alice", infer=False)
        assert memory.service.wait(PATIENCE)
        chat = ChatInferScale(memory=memory)
        agent = create_agent(chat, tools=[look_up], middleware=[InferScaleMemoryMiddleware(memory, user_id="alice")])
        for answer in (agent.invoke(QUESTION), await agent.ainvoke(QUESTION)):
            kinds = [message.type for message in answer["messages"]]
            assert kinds == ["human", "ai", "tool", "ai"]
            reports = [m.response_metadata["inferscale"] for m in answer["messages"] if isinstance(m, AIMessage)]
            assert [report["facts_injected"] for report in reports] == [1, 1]
    engine.close()


def test_without_an_owner_nothing_is_recalled_and_it_says_so(known: InferScaleMemory) -> None:
    agent = create_agent(ChatInferScale(memory=known), middleware=[InferScaleMemoryMiddleware(known)])
    with pytest.raises(ScopeError, match="user_id="):
        agent.invoke(QUESTION)


async def test_what_was_said_is_remembered_afterwards(memory: InferScaleMemory) -> None:
    middleware = InferScaleMemoryMiddleware(memory, user_id="alice", add=True, infer=False)
    agent = create_agent(ChatInferScale(memory=memory), middleware=[middleware])
    agent.invoke({"messages": [HumanMessage("I live in Oslo.")]})
    await agent.ainvoke({"messages": [HumanMessage("I like tea.")]})
    kept = memory.get_all(filters={"user_id": "alice"})["results"]
    assert sorted(item["memory"] for item in kept) == ["I like tea.", "I live in Oslo."]


async def test_an_asynchronous_memory_serves_asynchronous_agents(engine: FakeEngine) -> None:
    memory = AsyncInferScaleMemory(engine=engine)
    await memory.add("I am allergic to peanuts.", user_id="alice", infer=False)
    assert await asyncio.to_thread(memory.service.wait, PATIENCE)
    agent = create_agent(
        ChatInferScale(memory=memory), middleware=[InferScaleMemoryMiddleware(memory, user_id="alice")]
    )
    answer = await agent.ainvoke(QUESTION)
    assert answer["messages"][-1].response_metadata["inferscale"]["facts_injected"] == 1
    with pytest.raises(ConfigError, match="ainvoke"):
        await asyncio.to_thread(agent.invoke, QUESTION)
    memory.close()


def test_another_chat_model_gets_handles_in_its_system_message(known: InferScaleMemory) -> None:
    seen: list[Any] = []

    class Listening(GenericFakeChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(messages)
            return super()._generate(messages, *args, **kwargs)

    model = Listening(messages=iter([AIMessage("Peanuts.")]))
    middleware = InferScaleMemoryMiddleware(known, user_id="alice")
    create_agent(model, system_prompt="Be kind.", middleware=[middleware]).invoke(QUESTION)
    assert seen[0].type == "system" and seen[0].text.startswith("Be kind.\n\nMemories:\n- ism1.")


# The store.


@pytest.fixture
def store(memory: InferScaleMemory) -> InferScaleStore:
    return InferScaleStore(memory, namespace=("memories", "{user_id}"))


HOME = ("memories", "alice")


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
    with pytest.raises(ConfigError, match="no InferScaleMemory"):
        InferScaleStore(5)
    with pytest.raises(InputError, match="not JSON"):
        store.put(HOME, "k", {"content": object()})


def test_items_expire_and_their_handles_die(store: InferScaleStore, memory: InferScaleMemory) -> None:
    store.put(HOME, "gone", {"content": "Likes tea."}, ttl=0.05)
    store.put(HOME, "stays", {"content": "Likes coffee."})
    [handle] = [hit.handle for hit in store.search(HOME, refresh_ttl=False) if hit.key == "gone"]
    assert memory.service.resolve([handle]).facts
    deadline = time.monotonic() + PATIENCE
    while memory.service.resolve([handle]).facts and time.monotonic() < deadline:  # it goes by itself
        threading.Event().wait(0.1)
    assert not memory.service.resolve([handle]).facts
    assert [hit.key for hit in store.search(HOME)] == ["stays"]


def test_reading_renews_the_time_to_live(store: InferScaleStore) -> None:
    store.put(HOME, "k", {"content": "Likes tea."}, ttl=30)
    before = store._row(HOME, "k")
    assert store.get(HOME, "k", refresh_ttl=False) is not None
    unchanged = store._row(HOME, "k")
    assert store.get(HOME, "k") is not None
    after = store._row(HOME, "k")
    assert before and unchanged and after and before.expires_at == unchanged.expires_at < (after.expires_at or 0)


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


# The retriever.


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _memory(self, memory: InferScaleMemory) -> None:
        for text in ("Likes tea.", "Likes coffee.", "Allergic to peanuts.", "Works in Oslo.", "Has two cats."):
            memory.add(text, user_id="alice", infer=False)
        self.memory = memory

    @property
    def retriever_constructor(self) -> type[InferScaleRetriever]:
        return InferScaleRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"memory": self.memory, "user_id": "alice"}

    @property
    def retriever_query_example(self) -> str:
        return "What does she drink?"

    def test_documents_are_handles_or_texts(self) -> None:
        [document] = InferScaleRetriever(**self.retriever_constructor_params, k=1).invoke("allergies")
        assert document.page_content.startswith("ism1.")
        assert self.memory.resolve(document.page_content) == "Allergic to peanuts."
        assert document.metadata["score"] > 0
        told = InferScaleRetriever(**self.retriever_constructor_params, k=1, memory_format="text")
        assert told.invoke("allergies")[0].page_content == "Allergic to peanuts."

    def test_a_retriever_needs_a_memory_and_an_owner(self) -> None:
        with pytest.raises(ConfigError, match="no memory"):
            InferScaleRetriever(memory=5, user_id="alice")
        with pytest.raises(ConfigError, match="user_id"):
            InferScaleRetriever(memory=self.memory)
