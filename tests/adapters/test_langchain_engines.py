"""The chat model on engines: LangChain's integration tests that need no tools, and memories that change answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from recorder_helpers import ALICE, KEY, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.config import EncodingConfig, EngineConfig
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import Engine
from inferscale_mem.service import MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Scope

FACTS = (
    "My name is Nora.",
    "My dog is called Biscuit.",
    "I work as a nurse in Oslo.",
    "My favourite colour is green.",
    "My birthday is on 12 March.",
    "I am allergic to walnuts.",
)
DOGS = ("Rex", "Bella", "Max", "Luna", "Rocky", "Daisy", "Milo", "Coco")


@pytest.fixture(scope="module")
def fake_engine() -> Iterator[Engine]:
    engine = FakeEngine("Hello, and how are you today?")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def transformers_engine(smollm2_path: str) -> Iterator[Engine]:
    config = EngineConfig(kind="transformers", record_bytes=64 << 20, max_model_len=1024, self_test=False)
    engine = TransformersEngine(smollm2_path, config, KEY)
    yield engine
    engine.close()


class Standard:
    """Those of LangChain's tests that need no tools; on a fixture ``engine``."""

    returns_usage_metadata = True
    supported_usage_metadata_details: dict[str, list[str]] = {"invoke": [], "stream": []}  # noqa: RUF012
    chat_model_class = ChatInferScale

    @pytest.fixture
    def model(self, engine: Engine) -> ChatInferScale:
        self.chat_model_params: dict[str, Any] = {"engine": engine, "temperature": 0.0, "max_tokens": 24}
        return ChatInferScale(**self.chat_model_params)

    test_invoke = ChatModelIntegrationTests.test_invoke
    test_ainvoke = ChatModelIntegrationTests.test_ainvoke
    test_stream = ChatModelIntegrationTests.test_stream
    test_astream = ChatModelIntegrationTests.test_astream
    test_stream_events = ChatModelIntegrationTests.test_stream_events_v3
    test_astream_events = ChatModelIntegrationTests.test_astream_events_v3
    test_batch = ChatModelIntegrationTests.test_batch
    test_abatch = ChatModelIntegrationTests.test_abatch
    test_conversation = ChatModelIntegrationTests.test_conversation
    test_double_messages_conversation = ChatModelIntegrationTests.test_double_messages_conversation
    test_usage_metadata = ChatModelIntegrationTests.test_usage_metadata
    test_usage_metadata_streaming = ChatModelIntegrationTests.test_usage_metadata_streaming
    test_stop_sequence = ChatModelIntegrationTests.test_stop_sequence
    test_message_with_name = ChatModelIntegrationTests.test_message_with_name


class TestOnFake(Standard):
    @pytest.fixture
    def engine(self, fake_engine: Engine) -> Engine:
        return fake_engine


@pytest.mark.engine
class TestOnVllm(Standard):
    @pytest.fixture
    def engine(self, vllm_engine: Engine) -> Engine:
        return vllm_engine


@pytest.mark.parametrize("name", ["transformers_engine", pytest.param("vllm_engine", marks=pytest.mark.engine)])
def test_answers_come_from_the_memories(name: str, request: pytest.FixtureRequest) -> None:
    signer = HandleSigner(KEY, "langchain")
    index = SmallIndex(signer)
    service = MemoryService(request.getfixturevalue(name), index, signer, EncodingConfig())
    facts = [new_fact(text, ALICE) for text in FACTS]
    index.put(*facts)
    service.add(facts)
    assert service.wait(120)
    handles = "\n".join(f"- {service.handle(fact)}" for fact in facts[::-1])
    system = SystemMessage(f"Facts about the user:\n{handles}\nAnswer in one short sentence.")
    chat = ChatInferScale(service=service, temperature=0.0, max_tokens=16, user_id="alice")
    for question, word in (("What am I allergic to?", "walnut"), ("When is my birthday?", "March")):
        pieces: list[Any] = list(chat.stream([system, HumanMessage(question)]))
        whole = sum(pieces[1:], pieces[0])
        assert word in whole.content
        report = whole.response_metadata["inferscale"]
        assert (report["facts_requested"], report["facts_injected"], report["missed"]) == (6, 6, [])
        assert report["tokens_prefilled"] < 32 < report["tokens_injected"]
        assert whole.usage_metadata["input_token_details"]["cache_read"] == report["tokens_injected"]
    service.close()


@pytest.mark.engine
def test_eight_users_at_once_streams_in_turns_one_given_up_and_a_second_loop(vllm_engine: Engine) -> None:
    signer = HandleSigner(KEY, "langchain")
    index = SmallIndex(signer)
    service = MemoryService(vllm_engine, index, signer, EncodingConfig())
    dogs = dict(zip((f"user{n}" for n in range(8)), DOGS, strict=True))
    users = list(dogs)
    facts = {user: new_fact(f"My dog is called {dog}.", Scope(user_id=user)) for user, dog in dogs.items()}
    index.put(*facts.values())
    service.add(facts.values())
    assert service.wait(120)
    chat = ChatInferScale(service=service, temperature=0.0, max_tokens=16)
    question = [HumanMessage("What is the name of my dog?")]

    def check(answers: dict[str, Any]) -> None:
        """Each of its own user's fact alone; word for word they may differ, as rounding depends on the batch."""
        for user, answer in answers.items():
            report = answer.response_metadata["inferscale"]
            assert (report["facts_requested"], report["facts_injected"]) == (1, 1)
            assert [dog for dog in DOGS if dog in answer.content] == [dogs[user]], answer.content

    def of(user: str) -> dict[str, Any]:
        return {"memories": [service.handle(facts[user])], "user_id": user}

    async def all_at_once() -> None:
        answers = await asyncio.gather(*(chat.ainvoke(question, **of(user)) for user in users))
        check(dict(zip(users, answers, strict=True)))

    async def streams_in_turns() -> None:
        streams = {user: chat.astream(question, **of(user)) for user in users}
        told: dict[str, list[Any]] = {user: [] for user in users}
        await anext(streams["user0"])
        await streams.pop("user0").aclose()  # given up in the middle
        while streams:
            for user in list(streams):
                try:
                    told[user].append(await anext(streams[user]))
                except StopAsyncIteration:
                    del streams[user]
        check({user: sum(told[user][1:], told[user][0]) for user in users[1:]})

    check({user: chat.invoke(question, **of(user)) for user in users})
    for work in (all_at_once, streams_in_turns, all_at_once):
        asyncio.run(work())  # an event loop of its own each time
    service.close()
