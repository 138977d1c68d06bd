"""Prompts of exact lengths for measurements."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from inferscale_mem.protocols import ChatTokenizer, Engine
from inferscale_mem.types import EncodePlan, PromptPlan, Segment, Span

FACT_TOKENS = 22
QUESTION_TOKENS = 20
HEADER_TOKENS = 30
_FACT = (
    "- Fact number {n}: the user once said that place {m} was worth a visit in spring, before the rain comes back.\n"
)
_HEADER = "You answer questions about the user kindly, shortly and with care. This is what you know about the user."
_QUESTION = (
    "Given all of this, which place should the user visit first, and when? Answer in one short sentence, please."
)
_marks = itertools.count(1)


@dataclass(frozen=True)
class Workload:
    """A header, k facts and a question; the memory block ends on a block boundary of the paged cache.

    Why the boundary: the prefix cache keeps whole blocks. Were it elsewhere, a warm prefix cache would compute more
    than the question, and the comparison would flatter injection.
    """

    header: Segment
    facts: tuple[Segment, ...]
    question: Segment

    @property
    def injected(self) -> PromptPlan:
        """Facts in the order they were encoded in."""
        return PromptPlan((self.header, *self.facts, self.question))

    def reordered(self, turn: int) -> PromptPlan:
        """The same facts in another order for every turn, so that no earlier request left blocks for this one."""
        shift = turn % max(len(self.facts), 1)
        moved = self.facts[shift:] + self.facts[:shift]
        return PromptPlan(
            (self.header, *(moved[::-1] if turn // max(len(self.facts), 1) % 2 else moved), self.question)
        )

    @property
    def text(self) -> PromptPlan:
        """The same tokens with nothing to inject."""
        return PromptPlan((Segment("text", tuple(self.injected.token_ids)),))

    def unseen_text(self, mark: tuple[int, ...]) -> PromptPlan:
        """Plain text that begins differently, so that no block of it is in the prefix cache."""
        tokens = self.injected.token_ids
        return PromptPlan((Segment("text", (*tokens[:1], *mark, *tokens[1 + len(mark) :])),))


def make_workload(engine: Engine, k: int) -> Workload:
    """A workload of k facts for an engine, its records made: header and facts in one pass, so they are exact."""
    tokens = engine.tokenizer
    header_length = HEADER_TOKENS + -(HEADER_TOKENS + k * FACT_TOKENS) % engine.info.block_size
    mark = next(_marks)
    header = Segment("header", _exactly(tokens, f"[{mark}] {_HEADER}", header_length), f"bench.{mark}.header")
    facts = tuple(
        Segment("fact", _exactly(tokens, _FACT.format(n=n, m=7 * n + mark), FACT_TOKENS), f"bench.{mark}.{n}")
        for n in range(k)
    )
    question = Segment("text", _exactly(tokens, _QUESTION, QUESTION_TOKENS))
    workload = Workload(header, facts, question)
    _encode(engine, workload)
    return workload


def mark_tokens(engine: Engine, turn: int) -> tuple[int, ...]:
    """Tokens that no other turn has."""
    return _exactly(engine.tokenizer, f"{turn:04d} turn", 4)


def _exactly(tokens: ChatTokenizer, text: str, length: int) -> tuple[int, ...]:
    found = tokens.encode(text, literal=True)
    return tuple((found * (1 + length // len(found)))[:length])


def _encode(engine: Engine, workload: Workload) -> None:
    stored = (workload.header, *workload.facts)
    spans, position = [], 0
    for segment in stored:
        end = position + len(segment.token_ids)
        spans.append(Span(str(segment.record), position, end))
        position = end
    fresh = tuple(replace(segment, record=None) for segment in stored)
    report = engine.encode(EncodePlan(fresh, tuple(spans)))
    if report.refused:
        raise SystemExit(f"records were not made: {report.refused}")
