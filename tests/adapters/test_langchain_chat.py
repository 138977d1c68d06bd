"""ChatInferScale over a fake engine: what reaches the engine, what comes back, and what LangChain makes of both."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from recorder_helpers import ALICE, BOB, KEY, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.adapters.langchain.detached import NO_MEMORY
from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import ConfigError, EngineClosedError, HandleError, InferScaleError, InputError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.service import MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Fact, PromptPlan, Sampling, Scope

PATIENCE = 20.0
QUESTION = HumanMessage("What may I not eat?")


class House:
    """A service over a fake engine, and a chat model over it, as a memory would hold them.

    Attributes:
        author: writes the answers.
    """

    def __init__(self) -> None:
        self.author: Callable[[PromptPlan], str] = lambda plan: "Peanuts, of course."
        self.engine = FakeEngine(lambda plan, sampling: self.author(plan), key=KEY)
        signer = HandleSigner(KEY, "tests")
        self.index = SmallIndex(signer)
        self.service = MemoryService(self.engine, self.index, signer, EncodingConfig())

    def chat(self, **settings: Any) -> ChatInferScale:
        return ChatInferScale(memory=self, **settings)

    def remember(self, *facts: Fact) -> list[str]:
        self.index.put(*facts)
        self.service.add(facts)
        assert self.service.wait(PATIENCE)
        return [self.service.handle(fact) for fact in facts]

    @property
    def plan(self) -> PromptPlan:
        """Of the latest request."""
        return self.engine.requests[-1][0]

    @property
    def sampling(self) -> Sampling:
        """Of the latest request."""
        return self.engine.requests[-1][1]

    @property
    def prompt(self) -> str:
        """Text of the latest request, without control tokens."""
        return self.engine.tokenizer.decode(self.plan.token_ids)

    def close(self) -> None:
        self.service.close()
        self.engine.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


@pytest.fixture
def handles(house: House) -> list[str]:
    """Of two of Alice's facts, with records."""
    return house.remember(new_fact("Allergic to peanuts.", ALICE), new_fact("Likes tea.", ALICE))


def system(handles: list[str]) -> SystemMessage:
    return SystemMessage("You are kind. Memories:\n" + "\n".join(f"- {handle}" for handle in handles))


def hits(handles: list[str]) -> dict[str, Any]:
    return {"results": [{"id": str(i), "memory": handle, "score": 0.5} for i, handle in enumerate(handles)]}


async def each_way(chat: Any, messages: list[BaseMessage], **options: Any) -> list[AIMessage | AIMessageChunk]:
    """The same call in all four ways."""
    streamed = list(chat.stream(messages, **options))
    astreamed = [chunk async for chunk in chat.astream(messages, **options)]
    return [
        chat.invoke(messages, **options),
        await chat.ainvoke(messages, **options),
        sum(streamed[1:], streamed[0]),
        sum(astreamed[1:], astreamed[0]),
    ]


# Memories.


async def test_handles_in_the_system_message_are_injected_each_way(house: House, handles: list[str]) -> None:
    for answer in await each_way(house.chat(), [system(handles), QUESTION]):
        assert answer.content == "Peanuts, of course."
        report = answer.response_metadata["inferscale"]
        assert (report["facts_requested"], report["facts_injected"], report["missed"]) == (2, 2, [])
        assert "Allergic to peanuts." in house.prompt and "ism1" not in house.prompt


async def test_memories_of_the_call_are_injected_each_way(house: House, handles: list[str]) -> None:
    for memories in (hits(handles), hits(handles)["results"], handles):
        for answer in await each_way(house.chat(), [QUESTION], memories=memories):
            assert answer.response_metadata["inferscale"]["facts_injected"] == 2


async def test_memories_can_be_bound(house: House, handles: list[str]) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | house.chat().bind(memories=hits(handles))
    answer = await chain.ainvoke({"question": "What may I not eat?"})
    assert answer.response_metadata["inferscale"]["facts_injected"] == 2


def test_most_similar_memories_are_served_last(house: House, handles: list[str]) -> None:
    house.chat().invoke([QUESTION], memories=handles)
    assert house.prompt.index("Likes tea.") < house.prompt.index("Allergic to peanuts.")


def test_facts_without_a_record_are_served_as_text_and_counted(house: House, handles: list[str]) -> None:
    house.engine.pause_encoding()
    late = new_fact("Lives in Oslo.", ALICE)
    house.index.put(late)
    house.service.add([late])
    answer = house.chat().invoke([QUESTION], memories=[*handles, house.service.handle(late)])
    house.engine.resume_encoding()
    report = answer.response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (3, 2)
    assert [miss["handle"] for miss in report["missed"]] == [house.service.handle(late)]
    assert "Lives in Oslo." in house.prompt


def test_handles_in_human_ai_and_tool_messages_are_never_injected(house: House, handles: list[str]) -> None:
    handle = handles[0]
    call = {"id": "c1", "name": "look", "args": {}}
    messages = [
        HumanMessage(f"I found {handle}."),
        AIMessage(f"And {handle}.", tool_calls=[call]),
        ToolMessage(handle, tool_call_id="c1"),
        QUESTION,
    ]
    report = house.chat().invoke(messages).response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (1, 0)
    assert "Allergic" not in house.prompt


def test_memories_of_no_handle_are_refused_before_anything_starts(house: House) -> None:
    with pytest.raises(HandleError, match="memory_format"):
        house.chat().invoke([QUESTION], memories={"results": [{"memory": "Allergic to peanuts."}]})
    assert not house.engine.requests


def test_an_engine_alone_knows_no_handle_and_counts_it(handles: list[str]) -> None:
    engine = FakeEngine("Hello.")
    answer = ChatInferScale(engine=engine).invoke([system(handles), QUESTION], memories=handles)
    report = answer.response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (2, 0)
    assert {miss["handle"] for miss in report["missed"]} == set(handles)
    assert {miss["reason"] for miss in report["missed"]} == {NO_MEMORY} and "memory=" in NO_MEMORY
    engine.close()


def test_an_engines_own_service_ends_with_its_last_model() -> None:
    engine = FakeEngine("Hello.")
    chat = ChatInferScale(engine=engine)
    service = chat._service
    copy = chat.model_copy()
    del chat
    assert copy._service is service
    closed = threading.Event()
    service.recorder.close = closed.set  # type: ignore[method-assign]
    del copy
    assert closed.is_set()
    engine.close()


# Scope.


@pytest.mark.parametrize("options", [{"scope": {"user_id": "bob"}}, {"user_id": "bob"}, {"scope": BOB}], ids=str)
def test_the_calls_scope_keeps_other_peoples_memories_out(
    house: House, handles: list[str], options: dict[str, Any]
) -> None:
    for chat, call in ((house.chat(), options), (house.chat(**options), {}), (house.chat(user_id="alice"), options)):
        report = chat.invoke([system(handles), QUESTION], **call).response_metadata["inferscale"]
        assert (report["facts_requested"], report["facts_injected"]) == (2, 0)
        assert "Allergic" not in house.prompt


def test_memories_of_two_owners_are_not_mixed(house: House, handles: list[str]) -> None:
    theirs = house.remember(new_fact("Allergic to cats.", BOB))
    report = house.chat().invoke([QUESTION], memories=[*handles, *theirs]).response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (3, 0)
    report = house.chat().invoke([QUESTION], memories=[*handles, *theirs], scope=BOB).response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (3, 1)
    assert "cats" in house.prompt and "peanuts" not in house.prompt


def test_langchains_cache_serves_no_answer_to_another_owner_or_other_memories(house: House, handles: list[str]) -> None:
    numbers = itertools.count()
    house.author = lambda plan: f"answer {next(numbers)}"
    cache = InMemoryCache()
    alices, bobs = house.chat(cache=cache, user_id="alice"), house.chat(cache=cache, user_id="bob")
    open_chat = house.chat(cache=cache)
    given = [
        alices.invoke([QUESTION]).content,
        bobs.invoke([QUESTION]).content,
        open_chat.invoke([QUESTION]).content,
        open_chat.invoke([QUESTION], user_id="alice").content,
        open_chat.invoke([QUESTION], memories=handles[:1]).content,
        open_chat.invoke([QUESTION], memories=handles[1:]).content,
        house.chat(cache=cache, temperature=0.5).invoke([QUESTION]).content,
        house.chat(cache=cache, temperature=0.7).invoke([QUESTION], temperature=None).content,
        house.chat(cache=cache, stop=["x"]).invoke([QUESTION]).content,
    ]
    assert len(set(given)) == len(given)
    assert alices.invoke([QUESTION]).content == given[0], "the cache is not used at all"


# Sampling.


async def test_c3_stop_of_the_constructor_works_and_the_calls_overrides_it(house: House) -> None:
    chat = house.chat(stop=["s,"])
    for answer in await each_way(chat, [QUESTION]):
        assert (answer.content, answer.response_metadata["finish_reason"]) == ("Peanut", "stop")
    for answer in await each_way(chat, [QUESTION], stop=["course"]):
        assert answer.content == "Peanuts, of "


async def test_options_of_the_call_override_the_models_own_each_way(house: House) -> None:
    chat = house.chat(temperature=0.5, max_tokens=50, top_p=0.9, seed=1)
    for answer in await each_way(chat, [QUESTION], temperature=0.0, max_tokens=3, seed=None):
        assert (answer.content, answer.response_metadata["finish_reason"]) == ("Pea", "length")
        assert house.sampling == Sampling(temperature=0.0, max_tokens=3, top_p=0.9, seed=1)


def test_n_answers_come_as_n_generations_and_are_paid_once(house: House) -> None:
    answers = iter(["One.", "Two two.", "Three."])
    house.author = lambda plan: next(answers)
    usage = UsageMetadataCallbackHandler()
    result = house.chat(n=3, temperature=1.0).generate([[QUESTION]], callbacks=[usage])
    assert [generation.text for generation in result.generations[0]] == ["One.", "Two two.", "Three."]
    messages = [generation.message for generation in result.generations[0]]  # type: ignore[union-attr]
    assert all(message.response_metadata["finish_reason"] == "stop" for message in messages)
    tokens = len("One.Two two.Three.") + 3  # an end token each
    assert [message.usage_metadata and message.usage_metadata["output_tokens"] for message in messages] == [
        tokens,
        None,
        None,
    ]
    assert usage.usage_metadata["fake"]["output_tokens"] == tokens


async def test_n_answers_cannot_be_streamed(house: House) -> None:
    with pytest.raises(InputError, match="streamed"):
        list(house.chat(n=2).stream([QUESTION]))
    with pytest.raises(InputError, match="streamed"):
        _ = [chunk async for chunk in house.chat().astream([QUESTION], n=2)]


async def test_logprobs_come_per_token_each_way(house: House) -> None:
    for answer in await each_way(house.chat(max_tokens=3, logprobs=True, top_logprobs=2), [QUESTION]):
        entries = answer.response_metadata["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == ["P", "e", "a"]
        for entry in entries:
            best = entry["top_logprobs"]
            assert best[0]["logprob"] == entry["logprob"] < 0 and best[0]["token_id"] == entry["token_id"]
            assert best[1]["logprob"] <= best[0]["logprob"]


def test_without_being_asked_there_are_no_logprobs(house: House) -> None:
    assert "logprobs" not in house.chat().invoke([QUESTION]).response_metadata


@pytest.mark.parametrize("options", [{"n": 0}, {"temperature": -1}, {"memory": []}, {"model": "gpt"}, {"tools": [3]}])
def test_options_that_cannot_be_used_are_refused_before_anything_starts(house: House, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        house.chat().invoke([QUESTION], **options)
    assert not house.engine.requests


# Usage and metadata.


async def test_usage_counts_the_facts_at_their_real_length(house: House, handles: list[str]) -> None:
    for answer in await each_way(house.chat(), [system(handles), QUESTION]):
        usage, report = answer.usage_metadata, answer.response_metadata["inferscale"]
        assert usage is not None
        assert usage["input_tokens"] == len(house.plan.token_ids)
        assert usage["input_tokens"] == report["tokens_injected"] + report["tokens_prefilled"]
        assert usage["input_token_details"] == {"cache_read": report["tokens_injected"]}
        assert report["tokens_injected"] > len("Allergic to peanuts. Likes tea.")
        assert usage["output_tokens"] == len("Peanuts, of course.") + 1
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert answer.response_metadata["model_name"] == "fake"


def test_in_streams_usage_and_metadata_come_once_on_the_last_chunk(house: House, handles: list[str]) -> None:
    *before, last = house.chat().stream([system(handles), QUESTION])
    assert len(before) > 5
    assert not any(chunk.usage_metadata or chunk.response_metadata or chunk.chunk_position for chunk in before)
    assert last.usage_metadata and last.response_metadata["inferscale"] and last.chunk_position == "last"


async def test_streams_report_to_callbacks_and_events(house: House) -> None:
    usage = UsageMetadataCallbackHandler()
    list(house.chat().stream([QUESTION], config={"callbacks": [usage]}))
    assert usage.usage_metadata["fake"]["input_tokens"] == len(house.plan.token_ids)
    events = [event async for event in house.chat().astream_events([QUESTION], version="v2")]
    pieces = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == "Peanuts, of course." and len(pieces) > 5


def test_token_counts_are_the_models_own(house: House, handles: list[str]) -> None:
    chat = house.chat()
    assert chat.get_num_tokens("naïve <|end|>") == len("naïve <|end|>".encode())
    messages: list[BaseMessage] = [system(handles), QUESTION]
    counted = chat.get_num_tokens_from_messages(messages)
    chat.invoke(messages)
    assert counted == len(house.plan.token_ids)


# Messages.


def test_c4_system_messages_anywhere_reach_the_model(house: House, handles: list[str]) -> None:
    messages = [SystemMessage("One."), system(handles), QUESTION, AIMessage("Hm."), SystemMessage("Three."), QUESTION]
    report = house.chat().invoke(messages).response_metadata["inferscale"]
    assert report["facts_injected"] == 2
    assert all(text in house.prompt for text in ("One.", "You are kind.", "Three.", "Allergic to peanuts."))


def test_c5_content_in_blocks_with_and_without_handles(house: House, handles: list[str]) -> None:
    blocks: list[str | dict[str, Any]] = ["You are kind."]
    blocks += [{"type": "text", "text": handle} for handle in handles]
    blocks.append({"type": "non_standard", "value": {"secret": 1}})
    question = HumanMessage([{"type": "text", "text": "What may I"}, {"type": "text", "text": "not eat?"}])
    report = house.chat().invoke([SystemMessage(blocks), question]).response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (2, 2)
    assert "What may I\nnot eat?" in house.prompt
    assert "secret" not in house.prompt and "ism1" not in house.prompt


# As a LangChain model.


def test_one_source_is_enough(house: House) -> None:
    for given in ({"engine": house.engine, "service": house.service}, {"memory": house, "engine": house.engine}):
        with pytest.raises(ConfigError, match="Give one of"):
            ChatInferScale(**given)
    for name in ("memory", "service", "engine"):
        with pytest.raises(ConfigError, match=f"{name}=None"):
            ChatInferScale(**{name: None})


@pytest.mark.parametrize("setting", [{"temprature": 0}, {"temperature": -1}, {"stop": [""]}, {"user_id": "*"}], ids=str)
def test_wrong_settings_are_refused_at_once(house: House, setting: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError), match=next(iter(setting))):
        house.chat(**setting)


def test_making_a_model_does_not_start_the_memorys_engine() -> None:
    class Sleeping:
        @property
        def service(self) -> MemoryService:
            raise AssertionError("started")

    ChatInferScale(memory=Sleeping(), user_id="alice", temperature=0.0)


async def test_the_event_loop_runs_on_while_the_memorys_engine_starts(house: House) -> None:
    started = threading.Event()

    class Starting:
        @property
        def service(self) -> MemoryService:
            assert started.wait(PATIENCE), "the loop was blocked"
            return house.service

    async def loop_is_free() -> None:
        await asyncio.sleep(0)
        started.set()

    chat = ChatInferScale(memory=Starting())
    answer, _ = await asyncio.gather(chat.ainvoke([QUESTION]), loop_is_free())
    assert answer.content == "Peanuts, of course."
    started.clear()
    stream = chat.astream([QUESTION])
    first, _ = await asyncio.gather(anext(stream), loop_is_free())
    assert first.content
    await stream.aclose()  # type: ignore[attr-defined]


def test_no_live_object_is_ever_written_down(house: House) -> None:
    chat = house.chat(user_id="alice")
    assert chat.to_json()["type"] == "not_implemented"
    assert not {"memory", "engine", "service"} & set(chat.model_dump())
    assert "House" not in repr(chat)


async def test_errors_reach_the_caller_as_they_are(house: House) -> None:
    chat = house.chat()
    boom = InferScaleError("boom")
    for call in (chat.invoke, lambda m: list(chat.stream(m))):
        house.engine.fail_next(boom)
        with pytest.raises(InferScaleError) as caught:
            call([QUESTION])
        assert caught.value is boom
    house.engine.fail_next(boom)
    with pytest.raises(InferScaleError) as caught:
        await chat.ainvoke([QUESTION])
    assert caught.value is boom
    house.engine.close()
    with pytest.raises(EngineClosedError):
        await chat.ainvoke([QUESTION])


async def test_a_stream_left_early_aborts_its_request(house: House, handles: list[str]) -> None:
    chat = house.chat(max_tokens=2000, ignore_eos=True)
    for _ in chat.stream([system(handles), QUESTION]):
        break
    async for _ in chat.astream([system(handles), QUESTION]):
        break
    assert chat.invoke([QUESTION], max_tokens=1, ignore_eos=False).content == "P"


def test_two_event_loops_one_after_the_other(house: House, handles: list[str]) -> None:
    for _ in range(2):
        answer = asyncio.run(house.chat().ainvoke([system(handles), QUESTION]))
        assert answer.response_metadata["inferscale"]["facts_injected"] == 2


async def test_many_users_at_once_get_their_own_memories(house: House) -> None:
    decode = house.engine.tokenizer.decode
    house.author = lambda plan: decode([token for fact in plan.facts for token in fact.token_ids])
    owners = [Scope(user_id=f"user {i}") for i in range(8)]
    handles = [house.remember(new_fact(f"Number {i}.", owner))[0] for i, owner in enumerate(owners)]
    chat = house.chat()

    async def ask(i: int) -> str:
        chunks = [c async for c in chat.astream([system([handles[i]]), QUESTION], user_id=f"user {i}")]
        return "".join(str(chunk.content) for chunk in chunks)

    assert await asyncio.gather(*map(ask, range(8))) == [f"- Number {i}.\n" for i in range(8)]


def test_batches(house: House) -> None:
    results = house.chat().generate([[QUESTION], [HumanMessage("Hello")]])
    assert isinstance(results, LLMResult) and len(results.generations) == 2


def test_it_works_where_any_chat_model_does(house: House) -> None:
    broken = GenericFakeChatModel(messages=iter([]))
    assert broken.with_fallbacks([house.chat()], exceptions_to_handle=(Exception,)).invoke([QUESTION]).content
