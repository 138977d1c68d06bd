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

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from inferscale_mem.memory_block import decoration
from inferscale_mem.memory_block.literals import literals_around
from inferscale_mem.memory_block.ranges import Range, Ranges, Spans


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
    before = before.rstrip(decoration.BLANKS)
    if not before or before.endswith("\n"):
        return before, after
    return before + "\n", after.lstrip(decoration.BLANKS).removeprefix("\n")


def _shift(holes: Sequence[Range], by: int) -> list[Range]:
    return [Range(start - by, end - by) for start, end in holes]


def _without(text: str, holes: Sequence[Range]) -> str:
    """The text without the holes; words on both sides of one do not grow together."""
    parts, last, at = [], "", 0
    for start, end in [*holes, Range(len(text), len(text))]:
        if part := text[at:start]:
            parts += [" ", part] if _grow_together(last, part[0]) else [part]
            last = part[-1]
        at = end
    return "".join(parts)


def _grow_together(left: str, right: str) -> bool:
    """Whether one character behind the other makes another word of theirs; ``left`` may be empty."""
    return bool(left) and not (left.isspace() or right.isspace()) and (left.isalnum() or right.isalnum())


# From spans to holes.


def _holes(text: str, spans: Spans, keep: Spans) -> list[Range]:
    """What to cut: each run of spans with nothing but decoration in between, and the decoration around the run."""
    inner, kept = sorted(Range(*span) for span in spans), Ranges(keep)
    holes = _widened(text, inner, kept)
    literals = literals_around(text, inner)
    if not literals:
        return holes
    cut = Ranges(holes)
    emptied = {x for x in literals if not kept.touches(x) and decoration.wordless(_cut_out(text, x, cut))}
    telling = [x for x in literals if x not in emptied]
    within, told = Ranges(literals), Ranges(telling)
    outside = [s for s in inner if not within.touches(s)]
    entries = [decoration.around_entry(text, s) for s in inner if told.touches(s)]
    return sorted([*_widened(text, sorted([*outside, *emptied]), Ranges([*keep, *telling])), *entries])


def _widened(text: str, spans: list[Range], keep: Ranges) -> list[Range]:
    """Runs of spans with the decoration around them; with its line break, where nothing is left of a line."""
    runs = list(_runs(text, spans, keep))
    ceilings = [*(run[0].start for run in runs[1:]), len(text)] if runs else []
    holes: list[Range] = []
    for run, ceiling in zip(runs, ceilings, strict=True):
        start = _widened_left(text, run, holes[-1].end if holes else 0)
        end = _widened_right(text, run, ceiling)
        whole_line = decoration.starts_line(text, start) and text[end : end + 1] == "\n"
        holes.append(Range(start, end + 1 if whole_line else end))
    return holes


def _cut_out(text: str, where: Range, holes: Ranges) -> str:
    """The text of ``where`` that no hole covers."""
    covered = holes.inside(where)
    starts = [where.start, *(hole.end for hole in covered)]
    ends = [*(hole.start for hole in covered), where.end]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def _runs(text: str, spans: list[Range], keep: Ranges) -> Iterator[list[Range]]:
    """Neighbouring spans with nothing but decoration in between."""
    gaps = [Range(a.end, b.start) for a, b in pairwise(spans)]
    often = Counter(decoration.digitless(text[a:b]) for a, b in gaps)
    run = spans[:1]
    for index, gap in enumerate(gaps):
        words = text[gap.start : gap.end]
        before = text[gaps[index - 1].start if index else 0 : spans[index].start]
        behind = text[spans[index + 1].end : gaps[index + 1].end if index + 1 < len(gaps) else len(text)]
        repeated = often[decoration.digitless(words)] > 1 or decoration.repeats(before, words, behind)
        if (repeated or decoration.wordless_gap(words)) and not keep.touches(gap):
            run.append(spans[index + 1])
        else:
            yield run
            run = [spans[index + 1]]
    if run:
        yield run


# Decoration around a run.


def _widened_left(text: str, run: Sequence[Range], floor: int) -> int:
    start = run[0].start
    if len(run) > 1:
        start -= decoration.shared_end(text[floor:start], text[run[0].end : run[1].start])
    line = max(text.rfind("\n", floor, start) + 1, floor)
    lead = text[line:start]
    alone = len(run) == 1 or "\n" in text[run[0].end : run[1].start]
    if decoration.starts_line(text, line) and decoration.all_lead(lead, alone=alone):
        return line
    return line + len(decoration.stripped_lead(lead))


def _widened_right(text: str, run: Sequence[Range], ceiling: int) -> int:
    end = run[-1].end
    if len(run) > 1:
        end += decoration.shared_start(text[end:ceiling], text[run[-2].end : run[-1].start])
    newline = text.find("\n", end, ceiling)
    line = ceiling if newline < 0 else newline
    tail = text[end:line]
    if (newline >= 0 or ceiling == len(text)) and decoration.bare(tail):
        return line
    return end + decoration.decorated_tail(tail)
