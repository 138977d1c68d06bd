from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_mem.memory_block import remove, split

A, B, C = ("ism1.aaaaaaaaaaaaaaaa.0000000000000000".replace("a", letter) for letter in "abc")
THREE = [A, B, C]
SPAN = re.compile(r"ism1\.[a-z]{16}\.0{16}")


def spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in SPAN.finditer(text)]


def parts(text: str) -> tuple[str, str]:
    return split(text, spans(text))


def each(template: str, handles: list[str], start: int = 1) -> str:
    return "".join(template.replace("N", str(n)).replace("H", h) for n, h in enumerate(handles, start))


LISTS: dict[str, Callable[[list[str]], str]] = {
    "lines": "\n".join,
    "blank lines": "\n\n".join,
    "bullets": lambda hs: "- " + "\n- ".join(hs),
    "stars": lambda hs: "* " + "\n* ".join(hs),
    "dots": lambda hs: "• " + "\n• ".join(hs),
    "emoji": lambda hs: "✅ " + "\n✅ ".join(hs),
    "numbers": lambda hs: each("N. H\n", hs, 8).rstrip(),
    "numbers in parentheses": lambda hs: each("(N) H\n", hs).rstrip(),
    "footnotes": lambda hs: each("[N] H\n", hs).rstrip(),
    "letters": lambda hs: "\n".join(f"{letter}) {h}" for letter, h in zip("abc", hs, strict=False)),
    "quote": lambda hs: "> " + "\n> ".join(hs),
    "code": lambda hs: "\n".join(f"- `{h}`" for h in hs),
    "bold": lambda hs: "\n".join(f"- **{h}**" for h in hs),
    "quoted": lambda hs: "\n".join(f"“{h}”" for h in hs),
    "labels": lambda hs: each("Memory N: H\n", hs).rstrip(),
    "dashed labels": lambda hs: each("- Memory #N - H\n", hs).rstrip(),
    "bold labels": lambda hs: each("**Memory N:** H\n", hs).rstrip(),
    "snake labels": lambda hs: each("memory_N = H\n", hs).rstrip(),
    "indented": lambda hs: "\n".join(f"    - {h}" for h in hs),
    "windows lines": lambda hs: "\r\n".join(f"- {h}" for h in hs),
    "table": lambda hs: each("| N | H |\n", hs).rstrip(),
    "json": json.dumps,
    "json lines": lambda hs: json.dumps(hs, indent=2),
    "json objects": lambda hs: json.dumps([{"memory": h, "score": 0.5} for h in hs]),
    "json object lines": lambda hs: json.dumps({"results": [{"memory": h, "x": None} for h in hs]}, indent=1),
    "repr": lambda hs: repr([{"memory": h, "score": 0.87, "tags": []} for h in hs]),
    "commas": ", ".join,
    "semicolons": "; ".join,
    "bars": " | ".join,
    "spaces": " ".join,
    "and": lambda hs: ", ".join(hs[:-1]) + " and " + hs[-1] if len(hs) > 1 else hs[0],
    "inline numbers": lambda hs: each("N) H ", hs).rstrip(),
    "nothing": "".join,
}
"""What apps make of a list of handles; nothing of it has a meaning of its own."""


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("style", LISTS)
def test_decoration_goes(style: str, count: int) -> None:
    listed = LISTS[style](THREE[:count])
    assert parts(f"You are kind. Memories:\n{listed}") == ("You are kind. Memories:\n", "")
    assert parts(f"Memories:\n\n{listed}\n\nBe brief.\n- No lists.") == ("Memories:\n\n", "\nBe brief.\n- No lists.")
    assert parts(listed) == ("", "")
    assert parts(f"{listed}\nBe brief.") == ("", "Be brief.")
    assert remove(f"Memories:\n{listed}\nBe brief.", spans(f"Memories:\n{listed}\n")) == "Memories:\nBe brief."


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "style", [s for s in LISTS if "lines" not in s and "\n" not in LISTS[s](THREE) and "repr" not in s]
)
def test_decoration_goes_inside_a_line(style: str, count: int) -> None:
    listed = LISTS[style](THREE[:count])
    assert parts(f"Memories: {listed}. Be brief.") == ("Memories:\n", "Be brief.")
    assert parts(f"Known facts (of today): {listed}\nBe brief.") == ("Known facts (of today):\n", "Be brief.")


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        # Labels and tags that repeat go; what stands around all of them stays.
        ("Known:\nFact: A\nFact: B\nBe kind.", "Known:\n", "Be kind."),
        ("Known: Memory 1: A, Memory 2: B. Be kind.", "Known:\n", "Be kind."),
        ("<memories>\n<memory id='1'>A</memory>\n<memory id='2'>B</memory>\n</memories>\nBe kind.",
         "<memories>\n", "</memories>\nBe kind."),
        ("<memories><memory>A</memory><memory>B</memory></memories> Be kind.", "<memories>\n", "</memories> Be kind."),
        ("<ul><li>A</li><li>B</li></ul>", "<ul>\n", "</ul>"),
        ("<memory>A</memory>", "<memory>\n", "</memory>"),
        ("# Notes\n- memory: A\n  score: 0.71\n- memory: B\n  score: 0.6\n- memory: C\n  score: 0.5\nBe kind.",
         "# Notes\n", "Be kind."),
        ("- A (score: 0.71)\n- B (score: 0.6)\n- Be kind.", "", "- Be kind."),
        ("| # | memory |\n|---|---|\n| 1 | A |\n| 2 | B |\n\nBe kind.", "| # | memory |\n|---|---|\n", "\nBe kind."),
        ("A AND B AND C", "", ""),
        # Real words stay, in their order.
        ("You: A said, B meant\nand C too.", "You:\n", "said, B meant\nand too.".replace("B ", "")),
        ("User:\n- A\n- B\nWork:\n- C\nEnd.", "User:\n", "Work:\nEnd."),
        ("- A (work)\n- B (fun)\n", "", "(work)\n(fun)\n"),
        ("Use A when asked.", "Use\n", "when asked."),
        ("Top 5: A, B", "Top 5:\n", ""),
        ("It dislikes A, likes B", "It dislikes\n", "likes"),
        ("Memory 1: A\nMemory 2: B\nMemory 3: tea\n", "", "Memory 3: tea\n"),
        ("- A\n- tea\n- B\n", "", "- tea\n"),
        ("Quote 'A'.\nThen 'B's end.", "Quote\n", "Then\n's end.".replace("\n", " ")),
        ("She's 30. A\nOk", "She's 30.\n", "Ok"),
        ("**Known:** A\nOk", "**Known:**\n", "Ok"),
        # What is left of a literal stays in one piece, behind the block.
        ('Known: [{"id": "x", "memory": "A", "n": 1}, {"id": "y", "memory": "B", "n": 2}]\nOk',
         "Known:\n", '[{"id": "x", "n": 1}, {"id": "y", "n": 2}]\nOk'),
        ("Known: [{'id': \"it's\", 'memory': 'A'}]\nOk", "Known:\n", "[{'id': \"it's\"}]\nOk"),
        ('See ["A is it", "ok", B]. Bye', "See\n", '[" is it", "ok", ]. Bye'),
        # Brackets that never close are only characters.
        ('Sad :[ but "A" it is', "Sad :[ but\n", "it is"),
    ],
)  # fmt: skip
def test_what_stays(text: str, before: str, after: str) -> None:
    for name, handle in zip("ABC", THREE, strict=True):
        text = re.sub(rf"\b{name}\b", handle, text)
    assert parts(text) == (before, after)


def test_kept_spans_are_words() -> None:
    text = f"Known:\n- {A}\n- {B}\n- {C}\nOk"
    first, kept, last = spans(text)
    assert split(text, [first, last], [kept]) == ("Known:\n", f"- {B}\nOk")
    assert split(text, [last], [first, kept]) == (f"Known:\n- {A}\n- {B}\n", "Ok")
    literal = f'Known: ["{A}", "{B}"]'
    first, kept = spans(literal)
    assert remove(literal, [first], [kept]).endswith(f'"{B}"]')


def test_nothing_to_remove() -> None:
    assert remove(" - \n", []) == " - \n"


words = st.from_regex(r"[a-z]{3,9}", fullmatch=True)
glue = st.text(" \n\t-*•>|,;:.!?()[]{}\"'`<>#=/\\_~", max_size=6)


@st.composite
def odd_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Handles and words that occur once each, with anything in between; and the words."""
    said = draw(st.lists(words, max_size=6, unique=True))
    numbered = [f"{chr(97 + i) * 3}{word}" for i, word in enumerate(said)]
    pieces = draw(st.permutations([*numbered, *draw(st.lists(st.sampled_from(THREE), min_size=1, max_size=6))]))
    text = draw(glue)
    for piece in pieces:
        text += piece + draw(glue.filter(lambda g: g and not g[0].isalnum())) if piece else ""
        text += " "
    return text, [piece for piece in pieces if piece in numbered]


@given(odd_texts())
def test_words_stay_and_handles_go(case: tuple[str, list[str]]) -> None:
    text, said = case
    before, after = parts(text)
    for left in (before + after, remove(text, spans(text))):
        assert SPAN.search(left) is None
        assert re.findall(r"[a-z]{4,}", left) == said
    assert before == "" or before.endswith("\n")


@given(odd_texts(), st.data())
def test_nothing_is_made_up(case: tuple[str, list[str]], data: st.DataObject) -> None:
    """Only characters of the text are left, in order, and every span is kept or gone as asked."""
    text, _ = case
    every = spans(text)
    gone = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    kept = [span for span in every if span not in gone]
    left = remove(text, gone, kept)
    assert SPAN.findall(left) == [text[start:end] for start, end in kept]
    rest = iter("".join(text.split()))
    assert all(character in rest for character in "".join(left.split()))


@pytest.mark.parametrize("odd", ["(", "[", "{", "-", '"', "'", "\\", " ", "<a ", "<!--", '["', "1.", "a "])
def test_long_odd_texts(odd: str) -> None:
    """Work that grows with the square of such a text would take minutes here."""
    before, after = parts(f'Known: {odd * 20_000} "{A}" {odd * 20_000} end.')
    assert SPAN.search(before + after) is None
    assert before.startswith("Known:") and after.endswith("end.")
    # Twice as many handles as anybody serves, with words that differ in between.
    letters = string.ascii_letters
    before, after = parts("Known:" + "".join(f"{odd * 100}{A} wo{a}{b}rd " for a in letters for b in "abcd"))
    assert SPAN.search(before + after) is None
    assert re.findall(r"wo([a-zA-Z]{2})rd", before + after) == [a + b for a in letters for b in "abcd"]


def test_deep_literals_are_characters() -> None:
    text = "[" * 40 + f'"{A}"' + "]" * 40
    assert parts(f"Known: {text}\nOk") == ("Known:\n", "Ok")


ODD = 60_000
"""Characters, give or take: with work that grows with their square, each of these takes half an hour."""


@pytest.mark.parametrize(
    "text",
    [
        f"{A} {'<!--' * (ODD // 4)} {B}",
        f"{A} <a {'- ' * (ODD // 6)}X>{B} <a {'- ' * (ODD // 6)}Y>{A} <a {'- ' * (ODD // 6)}Z>",
        "".join(f"{'-' + chr(10)}" * (ODD // 6) + f"x {handle} " for handle in (A, B, A)),
        f"<a X{'- ' * (ODD // 6)}>{A}<a Y{'- ' * (ODD // 6)}>{B}<a Z{'- ' * (ODD // 6)}>{A}",
        f"{A}{' ' * (ODD // 2)}x{' ' * (ODD // 2)}{B}",
    ],
    ids=["comments", "an open tag that repeats", "lines that repeat", "tags that repeat", "blanks"],
)
def test_work_on_odd_texts_is_bounded(text: str) -> None:
    before, after = parts(text)
    assert A not in before + after and B not in before + after


def work(text: str) -> int:
    """Instructions of Python's that it takes to cut A out of a text and leave the other handles in it."""
    taken = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal taken
        frame.f_trace_opcodes = True
        taken += event == "opcode"
        return trace

    found = list(SPAN.finditer(text))
    cut, kept = ([m.span() for m in found if (m.group() == A) is mine] for mine in (True, False))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        left = remove(text, cut, kept)
    finally:
        sys.settrace(before)
    assert A not in left and left.count(B) == text.count(B)
    return taken


@pytest.mark.parametrize(
    "between", [" ", "\n- ", '", "', '"}, {"m": "', '"] word ["'], ids=["blanks", "bullets", "list", "objects", "lists"]
)
@pytest.mark.parametrize("handles", [[A, B], [A]], ids=["with others", "alone"])
def test_work_grows_with_the_text_not_with_its_square(between: str, handles: list[str]) -> None:
    few, many = (work(f'["{between.join(handles * count)}"]') for count in (300, 1200))
    assert few < many < 4.4 * few
