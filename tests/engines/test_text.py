from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_mem.engines.text import AnswerText, Detokenizer, StopFilter
from inferscale_mem.testing.bytes_tokenizer import END, BytesTokenizer
from inferscale_mem.types import Sampling

DECODE = BytesTokenizer().decode


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_pieces_make_up_the_text_and_are_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.add(byte) for byte in text.encode()]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


def test_a_broken_character_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(DECODE)
    assert [detokenizer.add(byte) for byte in "aé".encode()[:2]] == ["a", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_the_first_of_them_begins(text: str, stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    shown, stopped = "", False
    for letter in text:
        new, stopped = stop_filter.add(letter)
        shown += new
        if stopped:
            break
    else:
        shown += stop_filter.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if not ends:
        assert shown == text
    else:
        read = text[: min(ends)]
        assert shown == read[: min(read.find(stop) for stop in stops if stop in read)]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stop_filter = StopFilter(["\n\nUser"])
    assert stop_filter.add("Hi\n") == ("Hi", False)
    assert stop_filter.add("\nUs") == ("", False)
    assert stop_filter.add("e it") == ("\n\nUse it", False)
    assert stop_filter.add("\n") == ("", False)
    assert stop_filter.finish() == "\n"


@pytest.mark.parametrize(
    ("sampling", "text", "expected"),
    [
        (Sampling(max_tokens=9), "abc", ("abc", "stop")),
        (Sampling(max_tokens=3), "abc", ("abc", "length")),
        (Sampling(max_tokens=2), "abc", ("ab", "length")),
        (Sampling(max_tokens=9, stop=("b",)), "abc", ("a", "stop")),
        (Sampling(max_tokens=2, stop=("bc",)), "abc", ("ab", "length")),
        (Sampling(max_tokens=9, stop=("cx",)), "abc", ("abc", "stop")),
        (Sampling(max_tokens=9, stop=("b",), min_tokens=2), "abcb", ("abc", "stop")),
        (Sampling(max_tokens=5, ignore_eos=True), "abc", ("abca", "length")),
        (Sampling(max_tokens=4), "aé\u20ac", ("aé\ufffd", "length")),
    ],
)
def test_where_an_answer_ends(sampling: Sampling, text: str, expected: tuple[str, str]) -> None:
    answer = AnswerText(BytesTokenizer(), sampling, [END])
    shown = ""
    for token in [*text.encode(), END, *text.encode(), END]:
        new, reason = answer.add(token)
        shown += new
        if reason is not None:
            break
    assert (shown, reason) == expected


def test_what_is_complete_ends() -> None:
    answer = AnswerText(BytesTokenizer(), Sampling(max_tokens=9), [END])
    assert answer.add(ord("{")) == ("{", None)
    assert answer.add(ord("}"), complete=True) == ("}", "stop")
