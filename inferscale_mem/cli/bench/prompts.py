"""Prompts of exact lengths for measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from inferscale_mem.errors import SelfTestError
from inferscale_mem.handles import HandleSigner, split
from inferscale_mem.protocols import ChatTokenizer, Engine
from inferscale_mem.types import EncodePlan, Fact, PromptPlan, Scope, Segment, Span

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
_turns = itertools.count()


@dataclass(frozen=True)
class Workload:
    """A header, k facts of one user and a question; the memory block ends on a block boundary of the paged cache.

    Why the boundary: the prefix cache keeps whole blocks. Were it elsewhere, a warm prefix cache would compute more
    than the question, and the comparison would flatter injection.
    """

    header: Segment
    facts: tuple[Segment, ...]
    question: Segment
    scope: Scope
    store: str
    _orders: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def injected(self) -> PromptPlan:
        """Facts in the order they were encoded in."""
        return self._plan(self.facts)

    @property
    def orders(self) -> int:
        """So many orders of the facts begin differently or go on differently at once: all rotations, both ways."""
        return 2 * len(self.facts) if len(self.facts) > 2 else max(len(self.facts), 1)

    def reordered(self) -> PromptPlan:
        """The same facts in another order each time, so that no earlier request left blocks for this one.

        The first order is that of ``injected``, which a check may have sent before.

        Raises:
            SelfTestError: all orders were asked for; the next would be served from the prefix cache.
        """
        turn = next(self._orders)
        if turn >= self.orders:
            raise SelfTestError(
                f"{len(self.facts)} facts have only {self.orders} orders to send; measure fewer rounds, or more facts."
            )
        shift = turn % max(len(self.facts), 1)
        moved = self.facts[shift:] + self.facts[:shift]
        return self._plan(moved[::-1] if turn >= len(self.facts) and turn else moved)

    def _plan(self, facts: tuple[Segment, ...]) -> PromptPlan:
        return PromptPlan((self.header, *facts, self.question), self.scope, self.store)

    @property
    def text(self) -> PromptPlan:
        """The same tokens with nothing to inject."""
        return as_text(self.injected.token_ids)

    def unseen_text(self, engine: Engine) -> PromptPlan:
        """Plain text that begins differently each time, so that no block of it is in the prefix cache."""
        mark = _exactly(engine.tokenizer, f"{next(_turns):04d} turn", 4)
        tokens = self.injected.token_ids
        return as_text([*tokens[:1], *mark, *tokens[1 + len(mark) :]])


def as_text(tokens: list[int]) -> PromptPlan:
    """A prompt with nothing to inject."""
    return PromptPlan((Segment("text", tuple(tokens)),))


def make_workload(engine: Engine, k: int, signer: HandleSigner) -> Workload:
    """A workload of k facts for an engine, its records made: header and facts in one pass, so they are exact.

    Raises:
        SelfTestError: the engine did not keep the records.
    """
    tokens = engine.tokenizer
    header_length = HEADER_TOKENS + -(HEADER_TOKENS + k * FACT_TOKENS) % engine.info.block_size
    mark = next(_marks)
    scope = Scope(user_id=f"bench-{mark}")
    header = Segment("header", _exactly(tokens, f"[{mark}] {_HEADER}", header_length), f"header.bench-{mark}")
    facts = []
    for n in range(k):
        text = _FACT.format(n=n, m=7 * n + mark)
        handle = signer.mint(Fact(f"bench-{mark}-{n}", text, scope, "1"))
        facts.append(Segment("fact", _exactly(tokens, text, FACT_TOKENS), f"{split(handle)[0]}.bench", handle))
    question = Segment("text", _exactly(tokens, _QUESTION, QUESTION_TOKENS))
    workload = Workload(header, tuple(facts), question, scope, signer.store)
    _encode(engine, workload)
    return workload


def _exactly(tokens: ChatTokenizer, text: str, length: int) -> tuple[int, ...]:
    found = tokens.encode(text, literal=True)
    return tuple((found * (1 + length // len(found)))[:length])


def _encode(engine: Engine, workload: Workload) -> None:
    stored = (workload.header, *workload.facts)
    spans, position = [], 0
    for segment in stored:
        end = position + len(segment.token_ids)
        owner = workload.scope if segment.handle else None
        spans.append(Span(str(segment.record), position, end, segment.handle, owner))
        position = end
    fresh = tuple(replace(segment, record=None) for segment in stored)
    report = engine.encode(EncodePlan(fresh, tuple(spans), workload.scope, workload.store))
    if report.refused:
        reasons = ", ".join(sorted(set(report.refused.values())))
        raise SelfTestError(f"{len(report.refused)} of {len(spans)} records were not made: {reasons}")
