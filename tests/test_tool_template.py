"""Tools in the templates of the families: what each does by itself, and what is done where it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from family_templates import FAMILIES, family_tokenizer

from inferscale_mem.prompt import ANY_TOOL, PromptPlanner
from inferscale_mem.reading import AnswerReader, Call, Text
from inferscale_mem.tool_template import ToolTraits, short_id
from inferscale_mem.types import PromptPlan

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TRAITS = {
    "qwen": ToolTraits(native=True, parallel=True, form="hermes"),
    "thinking": ToolTraits(native=True, parallel=True, form="hermes"),
    "llama": ToolTraits(native=True, parallel=False, form="llama", key="parameters"),
    "mistral": ToolTraits(native=True, parallel=True, form="mistral"),
    "gemma": ToolTraits(native=False),
    "smollm": ToolTraits(native=False),
}
CALLS = [
    {"type": "function", "id": f"call-{i}", "function": {"name": "get_weather", "arguments": {"place": place}}}
    for i, place in enumerate(("Oslo", "Bergen"))
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "name": "get_weather", "tool_call_id": "call-0", "content": '"wet in Oslo"'},
    {"role": "tool", "name": "get_weather", "tool_call_id": "call-1", "content": '"dry in Bergen"'},
    {"role": "assistant", "content": "Oslo is wet."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "And tomorrow?"},
]


class Family:
    def __init__(self, name: str) -> None:
        self.tokenizer = family_tokenizer(name)
        self.planner = PromptPlanner(self.tokenizer, "f")

    def plan(self, messages: list[dict[str, Any]], **options: Any) -> PromptPlan:
        return self.planner.plan(messages, {}, is_ready=lambda record: False, scope=None, store="s", **options)

    def text(self, plan: PromptPlan) -> str:
        return self.tokenizer.decode(plan.token_ids, skip_special_tokens=False)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_traits(name: str) -> None:
    assert Family(name).planner._template.tools.traits == TRAITS[name]


def test_tools_calls_and_answers_reach_the_model(name: str) -> None:
    family = Family(name)
    text = family.text(family.plan(CONVERSATION, tools=[WEATHER]))
    for said in ("Be kind.", "Be brief.", "Rain?", "Oslo is wet.", "And tomorrow?", "Weather at a place."):
        assert text.count(said) == 1, said
    for told in ("wet in Oslo", "dry in Bergen"):
        assert text.count(told) == 1, told
    assert text.count('"place": "Oslo"') == text.count('"place": "Bergen"') == 1
    # An answer of a tool stands behind its call.
    assert text.index('"place": "Bergen"') < text.index("dry in Bergen")


def test_calls_of_a_conversation_can_be_read_back(name: str) -> None:
    """What the template (or the text in its place) writes is what the reader takes for a call."""
    family = Family(name)
    said = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}]
    then = [CONVERSATION[3], {"role": "assistant", "content": "Wet."}, {"role": "user", "content": "And?"}]
    plan = family.plan([*said, *then], tools=[WEATHER])
    text = family.text(plan)
    written = text[text.rindex("Rain?") + 5 : text.rindex("wet in Oslo")]
    start = written.index({"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "{"}[TRAITS[name].form])
    reader = AnswerReader(plan.reading)
    if name == "thinking":
        list(reader.add("Hm.</think>"))
    end = written.index("<|eot_id|>", start) if name == "llama" else len(written)
    pieces = [*reader.add(written[start:end]), *reader.finish()]
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [call.name for call in calls if call.name is not None] == ["get_weather"]
    assert json.loads("".join(call.arguments for call in calls)) == {"place": "Oslo"}


def test_an_answer_can_begin_as_a_call(name: str) -> None:
    family = Family(name)
    user = [{"role": "user", "content": "Rain?"}]
    named = family.plan(user, tools=[WEATHER], call="get_weather")
    assert family.text(named).endswith(f'{{"name": "get_weather", "{TRAITS[name].key}":')
    assert named.reading.call_of == "get_weather" and named.reading.reasoning_end is None
    chosen = family.plan(user, tools=[WEATHER], call=ANY_TOOL)
    assert named.token_ids[: len(chosen.token_ids) - 1] == chosen.token_ids[:-1]
    assert chosen.reading.in_call
    call = json.dumps({"name": "get_weather", TRAITS[name].key: {"place": "X"}})
    pieces = list(AnswerReader(chosen.reading).add(call))
    assert pieces[0] == Call(0, "get_weather", "") and not any(isinstance(piece, Text) for piece in pieces)


def test_without_tools_nothing_is_said_of_them(name: str) -> None:
    family = Family(name)
    user = [{"role": "user", "content": "Rain?"}]
    assert family.text(family.plan(user, tools=[])) == family.tokenizer.render(user)
    assert family.plan(user).reading.form is None


def test_reasoning_that_the_prompt_begins_is_known() -> None:
    user = [{"role": "user", "content": "Rain?"}]
    assert Family("thinking").plan(user).reading.reasoning_end == "</think>"
    assert Family("qwen").plan(user).reading.reasoning_end is None


@pytest.mark.parametrize("given", [None, "", "call_abc", "a-very-long-id" * 9, "ab\ud800"])
def test_short_ids(given: str | None) -> None:
    assert len(short_id(given)) == 9 and short_id(given).isalnum() and short_id(given) == short_id(given)
    assert short_id("abcDEF123") == "abcDEF123"
