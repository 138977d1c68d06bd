from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from template_tokenizer import FORGETFUL, GEMMA, QWEN, TEMPLATES, TemplateTokenizer

from inferscale_mem.chat_template import ChatTemplate, Traits, as_chat, new_mark
from inferscale_mem.errors import ChatTemplateError, InputError
from inferscale_mem.types import Messages


def say(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS = {
    "plain": say(("user", "hi")),
    "system": say(("system", "be kind"), ("user", "hi")),
    "two systems": say(("system", "be kind"), ("system", "be brief"), ("user", "hi")),
    "system in the middle": say(("user", "hi"), ("assistant", "hello"), ("system", "be kind"), ("user", "why")),
    "user twice": say(("system", "be kind"), ("user", "hi"), ("user", "there"), ("assistant", "hello")),
    "assistant twice": say(("user", "hi"), ("assistant", "hello"), ("assistant", "you"), ("user", "why")),
    "long": say(("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "why"), ("assistant", "so")),
    "system only": say(("system", "be kind")),
}


@pytest.mark.parametrize(
    ("template", "traits"),
    [
        ("qwen", Traits(blocks=False, system=True, system_anywhere=True, repeats=True)),
        ("llama", Traits(blocks=False, system=True, system_anywhere=True, repeats=True)),
        ("mistral", Traits(blocks=False, system=False, system_anywhere=False, repeats=False)),
        ("gemma", Traits(blocks=False, system=False, system_anywhere=False, repeats=False)),
        ("forgetful", Traits(blocks=False, system=True, system_anywhere=False, repeats=True)),
        ("blocks", Traits(blocks=True, system=True, system_anywhere=True, repeats=True)),
    ],
)
def test_traits(template: str, traits: Traits) -> None:
    assert ChatTemplate(TemplateTokenizer(TEMPLATES[template])).traits == traits


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_said_is_lost(template: str, conversation: str) -> None:
    chat = CONVERSATIONS[conversation]
    text = ChatTemplate(TemplateTokenizer(TEMPLATES[template])).render(as_chat(chat))
    said = [message["content"] for message in chat]
    assert all(text.count(content) == 1 for content in said)
    spoken = [message["content"] for message in chat if message["role"] != "system"]
    assert [text.index(content) for content in spoken] == sorted(text.index(content) for content in spoken)


@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        *((template, conversation) for template in ("qwen", "llama") for conversation in CONVERSATIONS),
        *(("forgetful", conversation) for conversation in ("plain", "system", "long")),
        *((template, "plain") for template in ("mistral", "gemma")),
    ],
)
def test_what_a_template_takes_it_gets_as_it_is(template: str, conversation: str) -> None:
    """No detours where none is needed: the text is what the tokenizer itself renders."""
    tokenizer = TemplateTokenizer(TEMPLATES[template])
    chat = as_chat(CONVERSATIONS[conversation])
    assert ChatTemplate(tokenizer).render(chat) == tokenizer.render(chat)


def test_folded_into_the_first_user_message() -> None:
    chat = as_chat(say(("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "why")))
    text = ChatTemplate(TemplateTokenizer(GEMMA)).render(chat)
    assert text.startswith("<bos><turn>user\nbe kind\n\nhi</turn>\n<turn>model\nhello</turn>\n")


def test_what_the_mark_stands_for_ends_its_line() -> None:
    mark = new_mark()
    chat = say(("system", f"Known:\n{mark}"), ("system", "be brief"), ("user", "hi"))
    before, behind = ChatTemplate(TemplateTokenizer(GEMMA)).render_around(chat, mark)
    assert before == "<bos><turn>user\nKnown:\n"
    assert behind == "\nbe brief\n\nhi</turn>\n<turn>model"
    before, behind = ChatTemplate(TemplateTokenizer(QWEN)).render_around(chat, mark)
    assert behind.startswith("<|end|>\n<|start|>system\nbe brief<|end|>")


def test_tool_calls_are_not_merged() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    seen: list[Messages] = []

    class Watched(TemplateTokenizer):
        def render(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
            seen.append(messages)
            return super().render(messages, tools=tools)

    template = "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    template += "{{ raise_exception('twice') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ChatTemplateError):
        ChatTemplate(Watched(template)).render([*say(("user", "hi")), called, called])
    assert seen[-1] == [*say(("user", "hi")), called, called]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}{{ messages[0].content }}", "loses what the user says"),
        ("nothing", "loses what the user says"),
        ("{{ raise_exception('no template') }}", "no template"),
    ],
)
def test_unusable_templates(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(TemplateTokenizer(template)).render(as_chat(say(("user", "hi"))))


def test_a_marked_message_that_is_dropped_is_an_error() -> None:
    mark = new_mark()
    with pytest.raises(ChatTemplateError, match="0 times"):
        ChatTemplate(TemplateTokenizer(FORGETFUL)).render_around(say(("tool", mark), ("user", "hi")), mark)


def test_content_in_all_forms() -> None:
    blocks = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three", "extra": 1}]
    messages = [
        {"role": "developer", "content": blocks},
        {"role": "assistant", "content": None, "tool_calls": [1]},
        {"role": "user", "content": []},
    ]
    assert as_chat(messages) == [
        {"role": "system", "content": "one\ntwo\nthree"},
        {"role": "assistant", "content": "", "tool_calls": [1]},
        {"role": "user", "content": ""},
    ]
    assert messages[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([{"content": "hi"}], "no role"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": {"type": "text"}}], "dict"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": [7]}], "int"),
    ],
)
def test_content_that_cannot_be_sent(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_chat(messages)
