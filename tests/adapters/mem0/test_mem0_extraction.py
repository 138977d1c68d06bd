"""Facts out of conversations: any LLM's replies, and what our own LLM is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mem0.exceptions import LLMError
from mem0.llms.base import LLMBase
from mem0_helpers import keeps, texts

from inferscale_mem import InferScaleError, InferScaleMemory
from inferscale_mem.adapters.mem0 import asking
from inferscale_mem.adapters.mem0.errors import ExtractionError
from inferscale_mem.adapters.mem0.extraction import CheckedLLM, current, read_reply
from inferscale_mem.adapters.mem0.llm import EngineLLM, EngineLLMConfig
from inferscale_mem.errors import ConfigError, FactError, PromptTooLongError
from inferscale_mem.testing import FakeEngine

ALICE = {"user_id": "alice"}
TEA = "User likes tea"


class Replies(LLMBase):
    """An app's LLM that always gives one reply, and keeps what it was asked."""

    def __init__(self, reply: Any) -> None:
        super().__init__()
        self.reply = reply
        self.asked: list[Any] = []

    def generate_response(self, messages: Any, tools: Any = None, tool_choice: str = "auto", **kwargs: Any) -> Any:
        self.asked.append(messages)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


# Replies (case M6).


@pytest.mark.parametrize(
    "reply",
    [
        '{"memory": [{"text": "User likes tea"}]}',
        '{"memory": ["User likes tea"]}',
        '{"memory": "User likes tea"}',
        '["User likes tea"]',
        '[{"fact": "User likes tea"}]',
        '{"facts": ["User likes tea"]}',
        '{"memories": [{"content": "User likes tea"}]}',
        '```json\n{"memory": [{"text": "User likes tea"}]}\n```',
        '<think>Hmm [maybe].</think>{"memory": [{"text": "User likes tea"}]}',
        'Here you are: {"memory": [{"text": "User likes tea"}]} Anything else?',
        'Here [at last] you are: {"memory": [{"text": "User likes tea"}]}',
        '{"memory": [{"text": "User likes tea"}, {"text": "User li',
        '{"memory": ["User likes tea", "User li',
        '{"memory": [{"memory": "User likes tea"}, {"memory": "User',
        '{"memory": [{"text": "User likes tea"},',
        '{"memory": [{"text": "User likes \\ud83dtea"}]}',
        '{"memory": [{"text": "User likes tea"}, 7, {"nothing": 1}, {"text": " "}]}',
        '{"memory":\n[{"text": "User likes tea"}],}',
        [{"type": "text", "text": '{"memory": [{"text": "User likes tea"}]}'}],
    ],
)
def test_facts_that_can_be_read_are_kept(reply: Any) -> None:
    assert [fact["text"] for fact in read_reply(reply)] == [TEA]


@pytest.mark.parametrize("reply", ['{"memory": []}', '{"memory": null}', "[]", "{}", '```\n{"facts": []}\n```'])
def test_nothing_to_remember_is_nothing(reply: str) -> None:
    assert read_reply(reply) == []


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "  ",
        None,
        "No facts.",
        '{"memory": [',
        '{"memory": [{"text": "User',
        '{"answer": "tea"}',
        "[1, 2]",
        '"tea"',
        "{",
    ],
)
def test_what_cannot_be_read_is_an_error(reply: Any) -> None:
    with pytest.raises(ExtractionError):
        read_reply(reply)


def test_other_fields_of_a_fact_stay() -> None:
    reply = '{"memory": [{"text": "User likes tea", "attributed_to": "user"}]}'
    assert read_reply(reply) == [{"text": TEA, "attributed_to": "user"}]


def test_facts_that_cannot_be_stored_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def check(text: str) -> None:
        if len(text) > 20:
            raise FactError("too long")

    long = "x" * 30
    assert read_reply(json.dumps([TEA, long]), check) == [{"text": TEA}]
    assert "too long" in caplog.text
    with pytest.raises(ExtractionError):
        read_reply(json.dumps([long]), check)


# In the pipeline, with an app's own LLM.


@pytest.fixture
def with_llm(open_memory: Any) -> Any:
    def open_(reply: Any, kind: Any = InferScaleMemory) -> tuple[Any, Replies]:
        llm = Replies(reply)
        memory = open_memory(kind=kind)
        memory.llm = CheckedLLM(llm)
        return memory, llm

    return open_


def test_readable_facts_of_a_broken_reply_are_stored(with_llm: Any) -> None:
    memory, llm = with_llm('{"memory": ["User likes tea", "User has a cat", "Us')
    assert texts(memory.add("I like tea. I have a cat.", **ALICE)) == ["User has a cat", TEA]
    assert texts(memory.get_all(filters=ALICE)) == ["User has a cat", TEA]
    assert memory.service.wait(30) and memory.service.engine.status().records >= 2
    assert len(llm.asked) == 1


def test_an_unreadable_reply_is_an_error_of_both_trees(with_llm: Any) -> None:
    memory, _ = with_llm("I'm sorry, Dave.")
    with pytest.raises(ExtractionError, match="Dave") as caught:
        memory.add("I like tea.", **ALICE)
    assert isinstance(caught.value, LLMError) and isinstance(caught.value, InferScaleError)
    assert texts(memory.get_all(filters=ALICE)) == []


def test_an_apps_own_failures_stay_mem0s(with_llm: Any) -> None:
    memory, _ = with_llm(TimeoutError("429"))
    with pytest.raises(LLMError) as caught:
        memory.add("I like tea.", **ALICE)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_an_apps_llm_is_otherwise_left_alone(with_llm: Any) -> None:
    memory, llm = with_llm("Steps: open the door.")
    memory.add("Open the door.", agent_id="robot", memory_type="procedural_memory")
    assert texts(memory.get_all(filters={"agent_id": "robot"})) == ["Steps: open the door."]
    assert memory.llm.reply == llm.reply and memory.llm.config is llm.config
    assert current() is None


# Our own LLM.


def test_sentences_the_model_keeps_are_stored_as_said(open_memory: Any) -> None:
    engine = FakeEngine(answers=keeps("tea", "Rex"))
    memory = open_memory(engine=engine)
    conversation = [
        {"role": "user", "content": "Hello! I like tea. What do you like?"},
        {"role": "assistant", "content": "I like tea too."},
        {"role": "user", "content": "My dog is called Rex."},
    ]
    assert texts(memory.add(conversation, **ALICE)) == ["I like tea.", "My dog is called Rex."]
    assert len(engine.requests) == 3, "one decision per sentence of the user that is no question"
    plan, sampling = engine.requests[0]
    assert sampling.temperature == 0.0 and sampling.json_schema is not None
    assert all(segment.kind == "text" for segment in plan.segments)
    assert texts(memory.add("My dog is called Rex.", **ALICE)) == [], "Mem0 knows it by its hash"


def test_an_agents_facts_are_what_it_says(open_memory: Any) -> None:
    memory = open_memory(engine=FakeEngine(answers=keeps("tea")))
    conversation = [{"role": "user", "content": "I like tea."}, {"role": "assistant", "content": "I serve tea."}]
    assert texts(memory.add(conversation, agent_id="waiter")) == ["I serve tea."]


def test_questions_cost_no_request(open_memory: Any) -> None:
    engine = FakeEngine()
    assert open_memory(engine=engine).add("What is the capital of France?", **ALICE) == {"results": []}
    assert engine.requests == []


def test_custom_instructions_reach_the_model(open_memory: Any) -> None:
    engine = FakeEngine(answers=keeps("tea"))
    memory = open_memory(engine=engine)
    memory.add("I like tea.", prompt="Only drinks count.", **ALICE)
    plan, _ = engine.requests[0]
    assert "Only drinks count." in engine.tokenizer.decode(plan.token_ids)


def test_a_sentence_too_long_for_a_fact(open_memory: Any) -> None:
    memory = open_memory()
    with pytest.raises(FactError, match="split it"):
        memory.add("word " * 12_000, **ALICE)
    assert texts(memory.get_all(filters=ALICE)) == []


def test_a_failing_engine_is_named(open_memory: Any) -> None:
    engine = FakeEngine()
    memory = open_memory(engine=engine)
    engine.fail_next(PromptTooLongError("too long for this engine"))
    with pytest.raises(PromptTooLongError):
        memory.add("I like tea.", **ALICE)
    engine.fail_next(InferScaleError("out of memory"))
    with pytest.raises(ExtractionError, match="out of memory") as caught:
        memory.add("I like tea.", **ALICE)
    assert isinstance(caught.value, LLMError)
    assert texts(memory.get_all(filters=ALICE)) == []


def test_an_undecided_model_is_an_error(open_memory: Any) -> None:
    memory = open_memory(engine=FakeEngine(answers="Well, "))
    with pytest.raises(ExtractionError, match="keeps no sentence"):
        memory.add("I like tea.", **ALICE)


def test_written_facts(open_memory: Any) -> None:
    engine = FakeEngine(answers='{"memory": [{"text": "Alice likes tea."}, {"text": "Alice likes tea."}]}')
    config = {"llm": {"provider": "inferscale", "config": {"extraction": "write"}}}
    memory = InferScaleMemory.from_config(config, engine=engine)
    with memory:
        assert texts(memory.add("I like tea.", **ALICE)) == ["Alice likes tea."]
    plan, sampling = engine.requests[0]
    assert "user: I like tea." in engine.tokenizer.decode(plan.token_ids)
    assert sampling.json_schema == asking.schema()


def test_long_conversations_are_written_about_in_parts() -> None:
    engine = FakeEngine(answers='{"memory": []}', max_model_len=4000)
    llm = EngineLLM(EngineLLMConfig(extraction="write"))
    llm.attach(lambda: engine)
    from inferscale_mem.adapters.mem0.extraction import Extraction, extracting

    said = [f"This is what I say in turn number {i}." for i in range(60)]
    with extracting(Extraction([{"role": "user", "content": text} for text in said])):
        assert llm.generate_response([{"role": "user", "content": "ignored"}]) == '{"memory": []}'
    prompts = [engine.tokenizer.decode(plan.token_ids) for plan, _ in engine.requests]
    assert len(prompts) > 1
    for text in said:
        assert sum(text in prompt for prompt in prompts) == 1
    engine.close()


def test_any_other_request_is_answered_within_the_context() -> None:
    engine = FakeEngine(answers="Fine.", max_model_len=300)
    llm = EngineLLM(EngineLLMConfig(temperature=0.5, max_tokens=1000))
    llm.attach(lambda: engine)
    assert llm.generate_response([{"role": "user", "content": "How are you?"}]) == "Fine."
    plan, sampling = engine.requests[0]
    assert sampling.temperature == 0.5
    assert sampling.max_tokens == 300 - len(plan.token_ids)
    llm.generate_response([{"role": "user", "content": "x"}], response_format={"type": "json_object"})
    assert engine.requests[1][1].json_schema == {"type": "object"}
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    llm.generate_response([{"role": "user", "content": "x"}], response_format=schema)
    assert engine.requests[2][1].json_schema == {"type": "array"}
    with pytest.raises(PromptTooLongError):
        llm.generate_response([{"role": "user", "content": "x" * 400}])
    with pytest.raises(ConfigError, match="tools"):
        llm.generate_response([{"role": "user", "content": "x"}], tools=[{"type": "function"}])
    engine.close()


def test_unknown_ways_of_extraction_are_refused() -> None:
    with pytest.raises(ConfigError, match="extraction='guess'"):
        EngineLLMConfig(extraction="guess")


def test_sentences() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": 'Hi!\nI like tea. "So do I." Really? v1.5 is out… 我住在里昂。你好吗？'},  # noqa: RUF001
        {"role": "assistant", "content": "Nice."},
        {"role": "user", "content": "I like tea. --- !!"},
        {"role": "user", "content": None},
    ]
    assert asking.sentences(messages, "user") == ["Hi!", "I like tea.", '"So do I.', "v1.5 is out…", "我住在里昂。"]
    assert asking.sentences(messages, "assistant") == ["Nice."]


def test_windows_lose_nothing() -> None:
    lines = ["one two three", "four", "x" * 50, "five six seven eight nine ten eleven"]
    parts = list(asking.windows(lines, 12, len))
    assert all(len(part) <= 12 for part in parts)
    assert "".join("".join(parts).split()) == "".join("".join(lines).split())


def test_kept() -> None:
    assert asking.kept(['{"mem', 'ory": [', '{"te']) and asking.kept('{ "memory" : [ {')
    assert not asking.kept(['{"memory": []}'])
    with pytest.raises(ExtractionError):
        asking.kept(['{"memory": ', "["])


def test_no_more_of_a_decision_is_read_than_it_takes() -> None:
    rest = iter(['{"memory": [', "{", '"text"'])
    assert asking.kept(rest)
    assert next(rest) == '"text"'
