"""Agents, stores and retrievers over a real memory (Mem0, embedded Qdrant, MiniLM) and a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langgraph_helpers import PATIENCE, QUESTION, prompt_of

from inferscale_mem import (
    AsyncInferScaleMemory,
    ChatInferScale,
    InferScaleMemory,
    InferScaleMemoryMiddleware,
    InferScaleRetriever,
)
from inferscale_mem.errors import ConfigError, ScopeError
from inferscale_mem.testing import FakeEngine


@pytest.fixture
def known(memory: InferScaleMemory) -> InferScaleMemory:
    """A memory that knows something of two people."""
    memory.add("I am allergic to peanuts.", user_id="alice", infer=False)
    memory.add("I may not eat fish.", user_id="bob", infer=False)
    assert memory.service.wait(PATIENCE)
    return memory


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
