"""Which sentences the chat keeps."""

from __future__ import annotations

import pytest

from inferscale_mem.cli.chat.statements import statements


@pytest.mark.parametrize(
    "line",
    ["I live in Oslo.", "My dog is called Biscuit", "I'm allergic to walnuts!", "On Sundays we go to the sea."],
)
def test_statements_about_the_speaker_are_kept_word_for_word(line: str) -> None:
    assert statements(f"  {line} ") == [line]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        "Where do I live?",
        "where do I live",
        "Do you know my name",
        "Tell me about my dog.",
        "Hello there, nice day.",
        "The sky is blue.",
        "I see.",
        "Immediately, please do it",
        "?!",
    ],
)
def test_all_else_is_not(line: str) -> None:
    assert statements(line) == []


def test_a_line_is_taken_apart_into_sentences() -> None:
    line = "Hi! I'm Nora. My dog is called Biscuit. What should I feed him?"
    assert statements(line) == ["I'm Nora.", "My dog is called Biscuit."]
    assert statements("I live in Oslo. My sister lives in Madrid") == ["I live in Oslo.", "My sister lives in Madrid"]
