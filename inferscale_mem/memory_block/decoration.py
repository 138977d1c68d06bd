# ruff: noqa: RUF001 (quotes, dashes and full-width punctuation are meant)
"""What in a text around handles is decoration: there only because a handle is, and meaningless without it."""

from __future__ import annotations

import re
from itertools import pairwise

from inferscale_mem.memory_block.ranges import Range

BLANKS = " \t\r\u00a0"
MAX_DECORATION = 256
"""Characters in front of a handle, on its line, that are looked at: bounds the work on odd texts."""
MAX_SHARED = 512
"""Characters on each side of a gap that are looked at for what repeats from handle to handle; likewise."""

_WORD = re.compile(r"[^\W\d_]")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]*>|<!--(?:(?!<!--)[^\n])*?-->")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[nrt])")
_KEY = re.compile(r"""(?P<quote>\\?["'])[\w .-]*(?P=quote)\s*:""")
_ATOM = re.compile(r"\b(?:null|None|[tT]rue|[fF]alse|and|or|And|AND|OR)\b")
_LETTERED = re.compile(r"(?<!\w)[A-Za-z][.)](?!\w)")
_LABEL = re.compile(r"[^\w\n]*[^\W\d_]+(?:[ _-][^\W\d_]+)?[ _-]?[#№]?\d+[^\w\n]*")

_QUOTES = "\"'“”‘’«»„`"
_GLUED_BEFORE = re.compile(rf"""(?:[{_QUOTES}(\[{{<*_~|#•·+–—-]|\\(?:u[0-9a-fA-F]{{4}}|["'nrt]))$""")
_BULLET_BEFORE = re.compile(r"(?:(?<=\s)|^)[-*+•·–—|#→>]+$")
_NUMBER_BEFORE = re.compile(r"(?<=[:;,.|]\s)(?:\(?\d+[.)]|\[\d+\]:?|#\d+:?)$")
_KEY_BEFORE = re.compile(rf"{_KEY.pattern}\s*$")
_COMMA_BEFORE = re.compile(r"\s*,\s*$")
_COMMA_BEHIND = re.compile(r"\s*,[ \t]*")
_BEHIND = re.compile(rf"""(?:[)\]}}>*_~|.,;:!?…。、，；：]|\\?[{_QUOTES}](?!\w))*(?:[ \t]+[-–—|,;]+(?=\s))?[ \t]*""")


# Between two handles.


def wordless_gap(gap: str) -> bool:
    """Whether what stands between two handles holds no words; the label of the second is none."""
    head, newline, last = gap.rpartition("\n")
    return wordless(head if newline and _LABEL.fullmatch(last) else gap)


def wordless(text: str) -> bool:
    """Whether no letters are left without tags, quoted keys, list letters, escapes, and a few joining words."""
    return bare(_ATOM.sub(" ", _KEY.sub(" ", _TAG.sub(" ", text))))


def bare(text: str) -> bool:
    """Whether no letters are left without list letters and escapes."""
    return not _WORD.search(_LETTERED.sub(" ", _ESCAPE.sub(" ", text)))


def repeats(before: str, gap: str, behind: str) -> bool:
    """Whether the words of a gap stand in front of its first span and behind its second one, too."""
    start = len(digitless(behind[: shared_start(behind, gap)]))
    end = len(digitless(before[len(before) - shared_end(before, gap) :]))
    whole = digitless(gap)
    return wordless(whole[start : max(len(whole) - end, start)])


# Around a handle.


def all_lead(lead: str, *, alone: bool) -> bool:
    """Whether a handle's line up to it is all decoration; ``alone``: the handle is the only one on its line."""
    return bare(lead) or (alone and _LABEL.fullmatch(lead) is not None)


def stripped_lead(lead: str) -> str:
    """A handle's line up to it, without the decoration at its end."""
    far, lead = lead[:-MAX_DECORATION], lead[-MAX_DECORATION:]
    while match := _GLUED_BEFORE.search(lead):
        lead = lead[: match.start()]
    lead = lead.rstrip(BLANKS)
    while match := _KEY_BEFORE.search(lead) or _BULLET_BEFORE.search(lead) or _NUMBER_BEFORE.search(lead):
        lead = lead[: match.start()].rstrip(BLANKS)
    return far + lead


def decorated_tail(tail: str) -> int:
    """How many characters right behind a handle are decoration, where more of the line follows."""
    match = _BEHIND.match(tail)
    return match.end() if match else 0


def around_entry(text: str, span: Range) -> Range:
    """What goes with a span that is all of a literal's string: its quotes, its key, and a comma."""
    start, end = span.start - 1, span.end + 1
    if text[start] not in "\"'" or text[end - 1 : end] != text[start]:
        return span
    floor = max(0, start - MAX_DECORATION)
    if key := _KEY_BEFORE.search(text[floor:start]):
        start = floor + key.start()
    if comma := _COMMA_BEHIND.match(text, end):
        return Range(start, comma.end())
    comma = _COMMA_BEFORE.search(text[floor:start])
    return Range(floor + comma.start() if comma else start, end)


# What repeats from handle to handle.


def shared_end(text: str, gap: str) -> int:
    """How much of the end of ``text`` is decoration, because the gap ends alike: labels, tags, whole lines."""
    first = len(text) - _alike(text[: -MAX_SHARED - 1 : -1], gap[: -MAX_SHARED - 1 : -1])
    floor = max(0, first - MAX_SHARED)
    inside = _inside(text[floor:])
    for start in range(first, len(text)):
        lines, newline, _ = text[start:].rpartition("\n")
        whole_lines = starts_line(text, start) and _WORD.search(lines)
        if whole_lines if newline else not inside[start - floor]:
            return len(text) - start if re.search(r"\w", text[start:]) else 0
    return 0


def shared_start(text: str, gap: str) -> int:
    """How much of the start of ``text`` is decoration, because the gap starts alike."""
    last = _alike(text[:MAX_SHARED], gap[:MAX_SHARED])
    inside = _inside(text[: last + MAX_SHARED])
    for end in range(last, 0, -1):
        _, newline, lines = text[:end].partition("\n")
        whole_lines = text[end : end + 1] in ("", "\n") and _WORD.search(lines)
        if whole_lines if newline else not inside[end]:
            return end if re.search(r"\w", text[:end]) else 0
    return 0


def _alike(text: str, other: str) -> int:
    """Length of the start of ``text`` that ``other`` starts with too; any digits equal any others."""
    i = j = 0
    while i < len(text) and j < len(other):
        if text[i].isdecimal() and other[j].isdecimal():
            i, j = _behind_digits(text, i), _behind_digits(other, j)
        elif text[i] == other[j]:
            i, j = i + 1, j + 1
        else:
            break
    return i


def _behind_digits(text: str, at: int) -> int:
    while at < len(text) and text[at].isdecimal():
        at += 1
    return at


def digitless(text: str) -> str:
    """The text with each number as 0, for comparing."""
    return re.sub(r"\d+", "0", text)


def starts_line(text: str, at: int) -> bool:
    """Whether a line starts at this character."""
    return at == 0 or text[at - 1] == "\n"


def _inside(text: str) -> list[bool]:
    """For each place of a text, its end included: whether a cut there would go through a word or a tag."""
    words = [before.isalnum() and behind.isalnum() for before, behind in pairwise(text)]
    inside = [False, *words, False][: len(text) + 1]
    for tag in _TAG.finditer(text):
        inside[tag.start() + 1 : tag.end()] = [True] * (tag.end() - tag.start() - 1)
    return inside
