# ruff: noqa: RUF001 (quotes, dashes and full-width punctuation are meant)
"""Cut handles out of a text that an app wrote, together with the decoration that only existed for them.

Apps join handles by newlines, bullets, numbers, commas, quotes, JSON, tags, labels, or anything else. What goes:

- between two handles: everything, if it holds no words. Punctuation, digits, tags (``</li><li>``), quoted keys
  (``"memory":``), numbered labels (``Memory 2:``) and a lone "and" or "or" are no words; nor are words that repeat
  from handle to handle (``Fact:``; digits are not compared). Other words stay, in their order;
- around a run of handles, on its own lines: quotes, brackets, bullets, list numbers, labels, and what repeats between
  the handles. A heading (``Memories:``) stays, and so do tags around the whole;
- a JSON or Python literal with quoted handles in it: all of it if only keys and numbers are left, else just the
  handles and their keys.

A line of which nothing is left goes. This file does not know what a handle looks like: it is given spans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from inferscale_mem.literals import Range, Spans, literals_around

BLANKS = " \t\r\u00a0"
MAX_DECORATION = 256
"""Characters in front of a handle, on its line, that are looked at: bounds the work on odd texts."""

_WORD = re.compile(r"[^\W\d_]")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]*>|<!--[^\n]*?-->")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[nrt])")
_KEY = re.compile(r"""(?P<quote>\\?["'])[\w .-]*(?P=quote)\s*:""")
_ATOM = re.compile(r"\b(?:null|None|[tT]rue|[fF]alse|and|or)\b")
_LETTERED = re.compile(r"(?<!\w)[A-Za-z][.)](?!\w)")
_LABEL = re.compile(r"[^\w\n]*[^\W\d_]+(?:[ _-][^\W\d_]+)?[ _-]?[#№]?\d+[^\w\n]*")

_QUOTES = "\"'“”‘’«»„`"
_GLUED_BEFORE = re.compile(rf"""(?:[{_QUOTES}(\[{{<*_~|#•·+–—-]|\\(?:u[0-9a-fA-F]{{4}}|["'nrt]))$""")
_BULLET_BEFORE = re.compile(r"(?:(?<=\s)|^)[-*+•·–—|#→>]+$")
_NUMBER_BEFORE = re.compile(r"(?<=[:;,.|]\s)(?:\(?\d+[.)]|\[\d+\]:?|#\d+:?)$")
_KEY_BEFORE = re.compile(rf"{_KEY.pattern}\s*$")
_COMMA_BEFORE = re.compile(r"\s*,\s*$")
_COMMA_BEHIND = re.compile(r"\s*,[ \t]*")
_BEHIND = re.compile(
    rf"""(?:[)\]}}>*_~|.,;:!?…。、，；：]|\\?[{_QUOTES}](?!\w))*(?:[ \t]+[-–—|,;]+(?=\s))?[ \t]*"""
)


def remove(text: str, spans: Spans, keep: Spans = ()) -> str:
    """The text without ``spans`` and their decoration. Spans to ``keep`` are words, whatever they look like."""
    return _without(text, _holes(text, spans, keep)) if spans else text


def split(text: str, spans: Spans, keep: Spans = ()) -> tuple[str, str]:
    """The text before and behind the first span, without any of the spans and their decoration.

    The first part is empty or ends with a newline, so that a block of whole lines fits between the two. The place is
    in front of the literal that the first span is part of, if anything is left of it. ``spans`` must not be empty.
    """
    first, *rest = _holes(text, spans, keep)
    literal = next((x for x in literals_around(text, spans) if x.start <= first.start and first.end <= x.end), None)
    if literal is not None and literal.end > first.end:
        before, after = text[: literal.start], _without(text[literal.start :], _shift([first, *rest], literal.start))
    else:
        before, after = text[: first.start], _without(text[first.end :], _shift(rest, first.end))
    before = before.rstrip(BLANKS)
    if not before or before.endswith("\n"):
        return before, after
    return before + "\n", after.lstrip(BLANKS).removeprefix("\n")


def _shift(holes: Sequence[Range], by: int) -> list[Range]:
    return [Range(start - by, end - by) for start, end in holes]


def _without(text: str, holes: Sequence[Range]) -> str:
    """The text without the holes; words on both sides of one do not grow together."""
    left, at = "", 0
    for hole in holes:
        left = _joined(left, text[at : hole.start])
        at = hole.end
    return _joined(left, text[at:])


def _joined(left: str, right: str) -> str:
    edges = left[-1:], right[:1]
    apart = not all(edges) or any(edge.isspace() for edge in edges) or not any(edge.isalnum() for edge in edges)
    return left + right if apart else f"{left} {right}"


# From spans to holes.


def _holes(text: str, spans: Spans, keep: Spans) -> list[Range]:
    """What to cut: each run of spans with nothing but decoration in between, and the decoration around the run."""
    inner = sorted(Range(*span) for span in spans)
    holes = _widened(text, inner, keep)
    literals = literals_around(text, inner)
    emptied = [x for x in literals if _wordless(_cut_out(text, x, holes)) and not _touches(keep, x)]
    telling = [x for x in literals if x not in emptied]
    if not literals:
        return holes
    outside = [s for s in inner if not _touches(literals, s)]
    entries = [_entry(text, s) for s in inner if _touches(telling, s)]
    return sorted([*_widened(text, sorted([*outside, *emptied]), [*keep, *telling]), *entries])


def _entry(text: str, span: Range) -> Range:
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


def _widened(text: str, spans: list[Range], keep: Spans) -> list[Range]:
    runs = list(_runs(text, spans, keep))
    ceilings = [*(run[0].start for run in runs[1:]), len(text)] if runs else []
    holes: list[Range] = []
    for run, ceiling in zip(runs, ceilings, strict=True):
        start = _widened_left(text, run, holes[-1].end if holes else 0)
        end = _widened_right(text, run, ceiling)
        whole_line = _starts_line(text, start) and text[end : end + 1] == "\n"
        holes.append(Range(start, end + 1 if whole_line else end))
    return holes


def _cut_out(text: str, where: Range, holes: Sequence[Range]) -> str:
    """The text of ``where`` that no hole covers."""
    starts = [where.start, *(max(hole.end, where.start) for hole in holes)]
    ends = [*(min(hole.start, where.end) for hole in holes), where.end]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def _runs(text: str, spans: list[Range], keep: Spans) -> Iterator[list[Range]]:
    gaps = [Range(a.end, b.start) for a, b in pairwise(spans)]
    often = Counter(_digitless(text[a:b]) for a, b in gaps)
    run = spans[:1]
    for index, gap in enumerate(gaps):
        words = text[gap.start : gap.end]
        before = text[gaps[index - 1].start if index else 0 : spans[index].start]
        behind = text[spans[index + 1].end : gaps[index + 1].end if index + 1 < len(gaps) else len(text)]
        goes = _wordless_gap(words) or often[_digitless(words)] > 1 or _repeats(before, words, behind)
        if goes and not _touches(keep, gap):
            run.append(spans[index + 1])
        else:
            yield run
            run = [spans[index + 1]]
    if run:
        yield run


def _repeats(before: str, gap: str, behind: str) -> bool:
    """Whether the words of a gap stand in front of its first span and behind its second one, too."""
    shared_start = _digitless(behind[: _shared_start(behind, gap)])
    shared_end = _digitless(before[len(before) - _shared_end(before, gap) :])
    whole = _digitless(gap)
    return _wordless(whole[len(shared_start) : max(len(whole) - len(shared_end), len(shared_start))])


def _wordless_gap(gap: str) -> bool:
    head, newline, last = gap.rpartition("\n")
    return _wordless(head if newline and _LABEL.fullmatch(last) else gap)


def _wordless(text: str) -> bool:
    return _bare(_ATOM.sub(" ", _KEY.sub(" ", _TAG.sub(" ", text))))


def _bare(text: str) -> bool:
    return not _WORD.search(_LETTERED.sub(" ", _ESCAPE.sub(" ", text)))


def _touches(keep: Spans, where: Range) -> bool:
    return any(start < where.end and where.start < end for start, end in keep)


# Decoration around a run.


def _widened_left(text: str, run: Sequence[Range], floor: int) -> int:
    start = run[0].start
    if len(run) > 1:
        start -= _shared_end(text[floor:start], text[run[0].end : run[1].start])
    line = max(text.rfind("\n", 0, start) + 1, floor)
    lead = text[line:start]
    alone = len(run) == 1 or "\n" in text[run[0].end : run[1].start]
    if _starts_line(text, line) and (_bare(lead) or (alone and _LABEL.fullmatch(lead))):
        return line
    return line + len(_stripped_lead(lead))


def _stripped_lead(lead: str) -> str:
    far, lead = lead[:-MAX_DECORATION], lead[-MAX_DECORATION:]
    while match := _GLUED_BEFORE.search(lead):
        lead = lead[: match.start()]
    lead = lead.rstrip(BLANKS)
    while match := _KEY_BEFORE.search(lead) or _BULLET_BEFORE.search(lead) or _NUMBER_BEFORE.search(lead):
        lead = lead[: match.start()].rstrip(BLANKS)
    return far + lead


def _widened_right(text: str, run: Sequence[Range], ceiling: int) -> int:
    end = run[-1].end
    if len(run) > 1:
        end += _shared_start(text[end:ceiling], text[run[-2].end : run[-1].start])
    newline = text.find("\n", end, ceiling)
    line = ceiling if newline < 0 else newline
    tail = text[end:line]
    if (newline >= 0 or ceiling == len(text)) and _bare(tail):
        return line
    match = _BEHIND.match(tail)
    return end + (match.end() if match else 0)


def _shared_end(text: str, gap: str) -> int:
    """How much of the end of ``text`` is decoration, because the gap ends alike: labels, tags, whole lines."""
    start = len(text) - _alike(text[::-1], gap[::-1])
    while start < len(text):
        lines, newline, _ = text[start:].rpartition("\n")
        whole_lines = _starts_line(text, start) and _WORD.search(lines)
        if whole_lines if newline else not _inside(text, start):
            return len(text) - start if re.search(r"\w", text[start:]) else 0
        start += 1
    return 0


def _shared_start(text: str, gap: str) -> int:
    """How much of the start of ``text`` is decoration, because the gap starts alike."""
    end = _alike(text, gap)
    while end:
        _, newline, lines = text[:end].partition("\n")
        whole_lines = text[end : end + 1] in ("", "\n") and _WORD.search(lines)
        if whole_lines if newline else not _inside(text, end):
            return end if re.search(r"\w", text[:end]) else 0
        end -= 1
    return 0


def _alike(text: str, other: str) -> int:
    """Length of the start of ``text`` that ``other`` starts with too; any digits equal any others."""
    i = j = 0
    while i < len(text) and j < len(other):
        if text[i].isdigit() and other[j].isdigit():
            i, j = _behind_digits(text, i), _behind_digits(other, j)
        elif text[i] == other[j]:
            i, j = i + 1, j + 1
        else:
            break
    return i


def _behind_digits(text: str, at: int) -> int:
    while at < len(text) and text[at].isdigit():
        at += 1
    return at


def _digitless(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def _starts_line(text: str, at: int) -> bool:
    return at == 0 or text[at - 1] == "\n"


def _inside(text: str, at: int) -> bool:
    """Whether a cut here would go through a word or a tag."""
    if 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum():
        return True
    return any(tag.start() < at < tag.end() for tag in _TAG.finditer(text))
