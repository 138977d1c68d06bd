"""Ranges of a text, and quick answers to which of many a place is in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Characters ``start`` (included) to ``end`` (not) of a text."""

    start: int
    end: int


Spans = Sequence[tuple[int, int]]
"""Ranges, in whatever form the caller has them."""


class Ranges:
    """Many ranges, which may overlap, to be asked about; each question takes the logarithm of their number.

    Args:
        spans: the ranges, in any order; none is empty.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if self._ends and start < self._ends[-1]:  # one range out of those that overlap
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def touches(self, where: Range) -> bool:
        """Whether a range and this one have a character in common, or this one is empty and lies inside of one."""
        index = bisect_right(self._ends, where.start)
        return index < len(self._ends) and self._starts[index] < where.end

    def inside(self, where: Range) -> list[Range]:
        """What the ranges cover of this one, in order."""
        first, last = bisect_right(self._ends, where.start), bisect_left(self._starts, where.end)
        covered = zip(self._starts[first:last], self._ends[first:last], strict=True)
        return [Range(max(start, where.start), min(end, where.end)) for start, end in covered]
