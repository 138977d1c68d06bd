"""Answers read piece by piece: the same however they are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_mem.reading import AnswerReader, Call, Form, Piece, Reading, Reasoning, Text


def read(text: str, reading: Reading, cuts: list[int] | None = None) -> list[Piece]:
    """The pieces, neighbours of one kind joined."""
    reader = AnswerReader(reading)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts or []), len(text)]
    joined: list[Piece] = []
    for start, end in itertools.pairwise(edges):
        for piece in reader.add(text[start:end]):
            _join(joined, piece)
    for piece in reader.finish():
        _join(joined, piece)
    return joined


def _join(joined: list[Piece], piece: Piece) -> None:
    last = joined[-1] if joined else None
    if isinstance(piece, Call):
        if piece.name is None:
            assert isinstance(last, Call) and last.index == piece.index
            joined[-1] = Call(last.index, last.name, last.arguments + piece.arguments)
            return
    elif type(last) is type(piece) and not isinstance(last, Call):
        assert last is not None
        joined[-1] = type(piece)(last.text + piece.text)
        return
    joined.append(piece)


CASES: list[tuple[Form | None, str, list[Piece]]] = [
    (None, "Just <text> {}", [Text("Just <text> {}")]),
    (None, "<think>\nhm\n</think>\n\nYes.", [Reasoning("hm"), Text("Yes.")]),
    (None, "[THINK]hm[/THINK]Yes.", [Reasoning("hm"), Text("Yes.")]),
    (None, "<think>never ends", [Reasoning("never ends")]),
    (None, "I <think> so", [Text("I <think> so")]),
    (
        "hermes",
        'Ok.\n<tool_call>\n{"name": "a", "arguments": {"x": [1, "}\\""]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"y": 2}, "name": "b"}</tool_call>',
        [Text("Ok."), Call(0, "a", '{"x": [1, "}\\""]}'), Call(1, "b", '{"y": 2}')],
    ),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', [Call(0, "a", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>', [Call(0, "a", '"x"')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": 5}</tool_call>', [Call(0, "a", "5")]),
    ("hermes", "<tool_call>rubbish</tool_call> then", [Call(0, "", '"rubbish"'), Text(" then")]),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', [Call(0, "", '"{\\"x\\": 1}"')]),
    ("hermes", '<tool_call>{"name": "a", "arg', [Call(0, "", '"{\\"name\\": \\"a\\", \\"arg"')]),
    ("hermes", "2 < 3 and <tool", [Text("2 < 3 and <tool")]),
    (
        "llama",
        '{"name": "a", "parameters": {"x": 1}}; {"type": "function", "name": "b", "parameters": {}}',
        [Call(0, "a", '{"x": 1}'), Call(1, "b", "{}")],
    ),
    ("llama", 'Say {"name": "a"}', [Text('Say {"name": "a"}')]),
    ("llama", '{"answer": 1} done', [Text('{"answer": 1} done')]),
    (
        "mistral",
        'Hi[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "b", "arguments": {}}]',
        [Text("Hi"), Call(0, "a", '{"x": 1}'), Call(1, "b", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]a_b[ARGS]{"x": 1}[TOOL_CALLS]c{}', [Call(0, "a_b", '{"x": 1}'), Call(1, "c", "{}")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=range(len(CASES)))
def test_what_an_answer_says(form: Form | None, text: str, expected: list[Piece]) -> None:
    assert read(text, Reading(form)) == expected
    assert read(text, Reading(form), list(range(len(text)))) == expected, "a character at a time"


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=6))
def test_how_it_is_cut_does_not_matter(case: tuple[Form | None, str, list[Piece]], cuts: list[int]) -> None:
    form, text, expected = case
    assert read(text, Reading(form), cuts) == expected


@given(st.sampled_from(["hermes", "llama", "mistral", None]), st.text('{}[]"<>/:, \nab\\', max_size=40))
def test_nothing_makes_it_fail(form: Form | None, noise: str) -> None:
    for start in ("", "<tool_call>", "[TOOL_CALLS]", '{"name": "a", "arguments": ', "<think>"):
        read(start + noise, Reading(form), list(range(len(start + noise))))


def test_answers_behind_a_prompt_that_has_begun_them() -> None:
    assert read("hm</think>Yes.", Reading(reasoning_end="</think>")) == [Reasoning("hm"), Text("Yes.")]
    assert read('{"x":1}', Reading("hermes", call_of="f"), [2]) == [Call(0, "f", '{"x":1}')]
    assert read('{"name":"f","arguments":{}}', Reading("hermes", in_call=True), [9]) == [Call(0, "f", "{}")]
