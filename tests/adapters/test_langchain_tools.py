"""Tools, structured output and reasoning of ChatInferScale, over a fake engine that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.errors import InputError
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Sampling

QUESTION = "Will it rain in Oslo?"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo", "days": 2}}\n</tool_call>'


@tool
def get_weather(place: str, days: int = 1) -> str:
    """Weather at a place."""
    return f"Dry in {place}."


@tool
def get_time() -> str:
    """The time of day."""
    return "noon"


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="the question")
    punchline: str


class JokeDict(TypedDict):
    """A joke."""

    setup: str
    punchline: str


JOKE = '{"setup":"Why?","punchline":"Because."}'


class Stage:
    """A chat model whose engine says ``says``."""

    def __init__(self) -> None:
        self.says = ""
        self.engine = FakeEngine(lambda plan, sampling: self.says)
        self.chat = ChatInferScale(engine=self.engine)

    @property
    def sampling(self) -> Sampling:
        return self.engine.requests[-1][1]

    @property
    def prompt(self) -> str:
        return self.engine.tokenizer.decode(self.engine.requests[-1][0].token_ids)

    async def each_way(self, chat: Any) -> list[AIMessage]:
        streamed = list(chat.stream(QUESTION))
        astreamed = [chunk async for chunk in chat.astream(QUESTION)]
        assert sum(chunk.usage_metadata is not None for chunk in streamed) == 1
        return [
            chat.invoke(QUESTION),
            await chat.ainvoke(QUESTION),
            sum(streamed[1:], streamed[0]),
            sum(astreamed[1:], astreamed[0]),
        ]


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.engine.close()


# Calls the model makes by itself.


async def test_a_call_is_read_out_of_the_answer_each_way(stage: Stage) -> None:
    stage.says = f"Let me look.\n{CALL}"
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather, get_time])):
        assert answer.content == "Let me look."
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"place": "Oslo", "days": 2})
        assert call["id"] and answer.invalid_tool_calls == []
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        assert "Weather at a place." in stage.prompt and "The time of day." in stage.prompt


def test_calls_are_streamed_while_they_are_written(stage: Stage) -> None:
    stage.says = CALL
    chunks: list[AIMessageChunk] = list(stage.chat.bind_tools([get_weather]).stream(QUESTION))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [piece["name"] for piece in pieces if piece["name"]] == ["get_weather"]
    assert len(pieces) > 5 and len({piece["id"] for piece in pieces if piece["id"]}) == 1
    assert not any(chunk.content for chunk in chunks)


async def test_several_calls_at_once(stage: Stage) -> None:
    stage.says = f'{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather, get_time])):
        assert [call["name"] for call in answer.tool_calls] == ["get_weather", "get_time"]
        assert len({call["id"] for call in answer.tool_calls}) == 2


@pytest.mark.parametrize("arguments", ['"Oslo"', "[1, 2]", "5", "null", '{"place": Oslo}'])
async def test_c6_arguments_that_are_no_object_end_in_invalid_tool_calls(stage: Stage, arguments: str) -> None:
    stage.says = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather])):
        assert answer.tool_calls == []
        [call] = answer.invalid_tool_calls
        assert (call["name"], call["args"]) == ("get_weather", arguments)


@pytest.mark.parametrize("rubbish", ["what?", '{"place": "Oslo"}', '{"name": 5, "arguments": {}}'])
async def test_c6_what_is_no_call_is_no_exception_either(stage: Stage, rubbish: str) -> None:
    stage.says = f"<tool_call>{rubbish}</tool_call>"
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather])):
        assert answer.tool_calls == []
        [call] = answer.invalid_tool_calls
        assert json.loads(call["args"] or "") == rubbish


def test_a_call_that_was_cut_off_is_not_carried_out(stage: Stage) -> None:
    stage.says = CALL
    answer = stage.chat.bind_tools([get_weather], max_tokens=60).invoke(QUESTION)
    assert answer.tool_calls == [] and len(answer.invalid_tool_calls) == 1
    assert answer.response_metadata["finish_reason"] == "length"


async def test_without_tools_a_call_is_text(stage: Stage) -> None:
    stage.says = CALL
    for chat in (stage.chat, stage.chat.bind_tools([get_weather], tool_choice="none")):
        for answer in await stage.each_way(chat):
            assert (answer.content, answer.tool_calls) == (CALL, [])
            assert "Weather at a place." not in stage.prompt


def test_calls_and_their_answers_go_back_to_the_model(stage: Stage) -> None:
    stage.says = "Dry."
    call = {"name": "get_weather", "args": {"place": "Oslo"}, "id": "a-long-id-of-another-provider"}
    asked = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call])]
    stage.chat.bind_tools([get_weather]).invoke([*asked, ToolMessage("Dry in Oslo.", tool_call_id=call["id"])])
    assert '"arguments": {"place": "Oslo"}' in stage.prompt and "Dry in Oslo." in stage.prompt


# Calls that are asked for.


@pytest.mark.parametrize(
    "choice", ["get_weather", {"type": "function", "function": {"name": "get_weather"}}], ids=["name", "openai"]
)
async def test_a_named_tool_is_called_under_its_schema(stage: Stage, choice: Any) -> None:
    stage.says = '{"place":"Oslo"}'
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather, get_time], tool_choice=choice)):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"place": "Oslo"})]
        assert stage.sampling.json_schema is not None
        assert stage.sampling.json_schema["required"] == ["place"]
        assert stage.sampling.json_schema["additionalProperties"] is False
        assert stage.prompt.endswith('<tool_call>\n{"name": "get_weather", "arguments":')


@pytest.mark.parametrize("choice", ["any", "required", True])
async def test_any_of_several_tools(stage: Stage, choice: Any) -> None:
    stage.says = '{"name":"get_time","arguments":{}}'
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather, get_time], tool_choice=choice)):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_time", {})]
        assert stage.sampling.json_schema is not None
        names = [option["properties"]["name"]["enum"] for option in stage.sampling.json_schema["anyOf"]]
        assert names == [["get_weather"], ["get_time"]]


@pytest.mark.parametrize(
    ("tools", "choice"), [([get_weather], "get_tme"), ([], "any"), ([3], None), ([get_weather], {"type": "x"})]
)
def test_what_cannot_be_called_is_refused_at_once(stage: Stage, tools: list[Any], choice: Any) -> None:
    with pytest.raises(InputError):
        stage.chat.bind_tools(tools, tool_choice=choice)


def test_references_in_a_tools_schema_are_resolved(stage: Stage) -> None:
    defs = {"Place": {"type": "object", "properties": {"name": {"type": "string"}}}}
    parameters = {"type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "$defs": defs}
    function = {"name": "f", "description": "", "parameters": parameters}
    stage.says = "{}"
    stage.chat.bind_tools([{"type": "function", "function": function}], tool_choice="f").invoke(QUESTION)
    assert "$" not in json.dumps(stage.sampling.json_schema)


# Structured output.


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
@pytest.mark.parametrize("schema", [Joke, JokeDict, Joke.model_json_schema()], ids=["pydantic", "typeddict", "dict"])
async def test_structured_output_each_way(stage: Stage, schema: Any, method: Any) -> None:
    stage.says = JOKE
    chat = stage.chat.with_structured_output(schema, method=method)
    wanted: Any = json.loads(JOKE)
    wanted = Joke(**wanted) if schema is Joke else wanted
    assert chat.invoke(QUESTION) == await chat.ainvoke(QUESTION) == wanted
    assert list(chat.stream(QUESTION))[-1] == [chunk async for chunk in chat.astream(QUESTION)][-1] == wanted
    assert stage.sampling.json_schema is not None
    assert ("required" in stage.sampling.json_schema) == (method != "json_mode")
    assert ("the question" in stage.prompt) == (method == "function_calling" and schema is not JokeDict)


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_include_raw_gives_what_cannot_be_parsed(stage: Stage, method: Any) -> None:
    chat = stage.chat.with_structured_output(Joke, method=method, include_raw=True)
    stage.says = JOKE
    good = chat.invoke(QUESTION)
    assert good["parsed"] == Joke(setup="Why?", punchline="Because.") and good["parsing_error"] is None
    assert good["raw"].usage_metadata
    stage.says = '{"setup":5}'
    bad = chat.invoke(QUESTION)
    assert bad["parsed"] is None and isinstance(bad["parsing_error"], Exception)


@pytest.mark.parametrize(
    "make", [lambda c: c.with_structured_output(), lambda c: c.with_structured_output(Joke, method="x")]
)
def test_wrong_structured_output_is_refused(stage: Stage, make: Callable[[ChatInferScale], Any]) -> None:
    with pytest.raises(InputError):
        make(stage.chat)


def test_response_format_as_openai_has_it(stage: Stage) -> None:
    stage.says = JOKE
    wanted = {"type": "json_schema", "json_schema": {"name": "j", "schema": {"type": "object", "required": ["setup"]}}}
    stage.chat.invoke(QUESTION, response_format=wanted)
    assert stage.sampling.json_schema == {"type": "object", "required": ["setup"]}
    with pytest.raises(InputError, match="response_format"):
        stage.chat.invoke(QUESTION, response_format={"type": "xml"})


# Reasoning.


async def test_c2_reasoning_is_kept_apart(stage: Stage) -> None:
    stage.says = "<think>\nOslo is wet.\n</think>\n\nYes."
    for answer in await stage.each_way(stage.chat):
        assert answer.content == "Yes."
        assert answer.additional_kwargs["reasoning_content"] == "Oslo is wet."
        assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
        assert answer.content_blocks[0]["reasoning"] == "Oslo is wet."


async def test_c2_reasoning_before_a_call(stage: Stage) -> None:
    stage.says = f"<think>I should look.</think>{CALL}"
    for answer in await stage.each_way(stage.chat.bind_tools([get_weather])):
        assert answer.additional_kwargs["reasoning_content"] == "I should look."
        assert answer.content == "" and len(answer.tool_calls) == 1


# Counting and profile.


def test_tools_count_as_tokens(stage: Stage) -> None:
    plain = stage.chat.get_num_tokens_from_messages([HumanMessage(QUESTION)])
    with_tools = stage.chat.get_num_tokens_from_messages([HumanMessage(QUESTION)], tools=[get_weather])
    stage.says = "Yes."
    told = stage.chat.bind_tools([get_weather]).invoke(QUESTION).usage_metadata
    assert told is not None and told["input_tokens"] == with_tools > plain


def test_the_profile_is_the_engines(stage: Stage) -> None:
    assert stage.chat.profile is not None
    assert stage.chat.profile["max_input_tokens"] == stage.engine.info.max_model_len - 1
    assert stage.chat.profile["tool_calling"] and not stage.chat.profile["image_inputs"]
