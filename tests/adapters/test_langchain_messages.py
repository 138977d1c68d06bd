"""LangChain's messages become chat-template dicts, and what no template can take is refused."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from inferscale_mem.adapters.langchain.messages import to_template
from inferscale_mem.errors import InputError


def one(message: BaseMessage) -> dict[str, object]:
    (converted,) = to_template([message])
    return converted


def test_each_kind_of_message_gets_its_role() -> None:
    messages = [
        SystemMessage("Be kind."),
        HumanMessage("Hello", name="ada"),
        AIMessage("Hi."),
        ToolMessage("5", tool_call_id="c1", name="add"),
        ChatMessage(role="developer", content="Be brief."),
    ]
    assert to_template(messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello", "name": "ada"},
        {"role": "assistant", "content": "Hi."},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
        {"role": "developer", "content": "Be brief."},
    ]


def test_text_blocks_are_joined_and_providers_own_blocks_left_out() -> None:
    content = ["Be kind.", {"type": "non_standard", "value": {"x": 1}}, {"type": "text", "text": "Be brief."}]
    assert one(SystemMessage(content))["content"] == "Be kind.\nBe brief."


def test_pieces_of_an_answer_are_one_text() -> None:
    content = [{"type": "text", "text": "It is "}, {"type": "text", "text": "Oslo."}]
    assert one(AIMessage(content))["content"] == "It is Oslo."


def test_tool_calls_go_along_in_the_templates_form() -> None:
    message = AIMessage(
        [{"type": "text", "text": "Adding."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
        tool_calls=[{"id": "c1", "name": "add", "args": {"a": 1}}],
        invalid_tool_calls=[{"id": "c2", "name": "add", "args": "[1", "error": "not an object"}],
    )
    assert one(message) == {
        "role": "assistant",
        "content": "Adding.",
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}},
            {"type": "function", "id": "c2", "function": {"name": "add", "arguments": "[1"}},
        ],
    }


@pytest.mark.parametrize(
    "message",
    [
        AIMessage("4", additional_kwargs={"reasoning_content": "2 + 2"}),
        AIMessage([{"type": "reasoning", "reasoning": "2 + 2"}, {"type": "text", "text": "4"}]),
        AIMessage([{"type": "thinking", "thinking": "2 + 2"}, {"type": "text", "text": "4"}]),
    ],
)
def test_reasoning_is_kept_apart_from_the_answer(message: AIMessage) -> None:
    assert one(message) == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "image", "url": "x"},
        {"type": "audio", "base64": ""},
        {"type": "text"},
        {"no": "type"},
    ],
)
def test_what_is_no_text_is_refused_by_name(block: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"type 'human'.*{block.get('type')!r}.*text"):
        to_template([HumanMessage([{"type": "text", "text": "Look:"}, block])])


@pytest.mark.parametrize("message", [FunctionMessage("5", name="f"), RemoveMessage(id="1")])
def test_messages_without_a_role_are_refused(message: BaseMessage) -> None:
    with pytest.raises(InputError, match=type(message).__name__):
        to_template([message])


def test_no_messages_are_refused() -> None:
    with pytest.raises(InputError, match="no messages"):
        to_template([])
