"""Prompts, facts and questions for the conformance suite, made with the engine's own tokenizer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import Engine
from inferscale_mem.types import Chunk, EncodePlan, EncodeReport, Fact, InjectReport, PromptPlan, Sampling, Scope
from inferscale_mem.types import Segment as Segment
from inferscale_mem.types import Span as Span

KEY = bytes(range(32))
"""Signs the suite's handles: open engines with it."""
STORE = "conformance"
ALICE, BOB = Scope(user_id="alice"), Scope(user_id="bob")
GREEDY = Sampling(max_tokens=8, temperature=0.0)
FIRST_TOKEN = Sampling(max_tokens=1, temperature=0.0, logprobs=-1)

_numbers = itertools.count(1)
_signer = HandleSigner(KEY, STORE)


@dataclass(frozen=True)
class Memory:
    """A fact with all that stands for it.

    Attributes:
        segment: as it is asked for in a plan.
        scope: its owner.
    """

    segment: Segment
    scope: Scope

    @property
    def handle(self) -> str:
        """The fact's handle."""
        return str(self.segment.handle)

    @property
    def record(self) -> str:
        """The fact's record id."""
        return str(self.segment.record)

    def with_tokens(self, token_ids: tuple[int, ...]) -> Memory:
        """The same fact, asked for with other tokens."""
        return replace(self, segment=replace(self.segment, token_ids=token_ids))

    def with_handle(self, handle: str) -> Memory:
        """The same fact, asked for by another handle."""
        return replace(self, segment=replace(self.segment, handle=handle))


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        text: all of it.
        tokens: its token ids.
        logprobs: of the first token; empty unless asked for.
        finish_reason: why it ended.
        report: the request's report.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: dict[int, float]
    finish_reason: str
    report: InjectReport


class Scene:
    """Makes facts and plans for one engine; what it makes is never equal to what another scene made.

    Args:
        engine: whose tokenizer is used, and who is asked.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._name = f"scene{next(_numbers)}"
        lead = f"{self._name}. You are kind. This is what you know about the user:\n"
        self.header = Segment("header", self._tokens(lead), f"header.{self._name}")
        self.suffix = self.text("\nWhat does the user like best? Answer in one sentence.\n")

    def text(self, text: str) -> Segment:
        """A segment that is always prefilled."""
        return Segment("text", self._tokens(text))

    def memory(self, text: str, scope: Scope = ALICE) -> Memory:
        """A fact of one line."""
        fact = Fact(id=f"{self._name}.{next(_numbers)}", text=text, scope=scope, revision="1")
        record = f"{_signer.handle_id(fact)}.conformance"
        return Memory(Segment("fact", self._tokens(f"- {text}\n"), record, _signer.mint(fact)), scope)

    def memory_of(self, count: int) -> Memory:
        """A fact of so many tokens."""
        memory = self.memory("Likes words. ")
        tokens = memory.segment.token_ids * (1 + count // len(memory.segment.token_ids))
        return memory.with_tokens(tokens[:count])

    def twin(self, memory: Memory) -> Memory:
        """Another fact of the same tokens."""
        return self.memory("", memory.scope).with_tokens(memory.segment.token_ids)

    def memories(self, count: int, scope: Scope = ALICE) -> list[Memory]:
        """Facts of different lengths."""
        things = ("tea", "long walks", "old maps of the sea", "rain", "peanut butter on toast", "the colour blue")
        return [self.memory(f"Likes {things[i % len(things)]}, number {i}.", scope) for i in range(count)]

    def plan(
        self,
        memories: Sequence[Memory],
        *,
        scope: Scope | None = ALICE,
        header: bool = True,
        suffix: Segment | None = None,
        store: str = STORE,
    ) -> PromptPlan:
        """A request that asks for memories, all of which have records as far as it knows."""
        lead = (self.header,) if header else ()
        facts = tuple(memory.segment for memory in memories)
        return PromptPlan((*lead, *facts, suffix or self.suffix), scope, store)

    def encode(self, new: Sequence[Memory], context: Sequence[Memory] = (), *, header: bool = True) -> EncodeReport:
        """Encode facts in one pass, behind the header and a context of facts, whose records are asked for."""
        lead = [self.header] if header else []
        segments = [*lead, *(memory.segment for memory in context)]
        start = sum(len(segment.token_ids) for segment in segments)
        spans, scope = [], None
        for memory in new:
            end = start + len(memory.segment.token_ids)
            spans.append(Span(memory.record, start, end, memory.handle, memory.scope))
            segments.append(Segment("fact", memory.segment.token_ids, None, memory.handle))
            start, scope = end, memory.scope
        return self.engine.encode(EncodePlan(tuple(segments), tuple(spans), scope, STORE))

    def encode_header(self) -> EncodeReport:
        """Make the header's record."""
        unread = Segment("header", self.header.token_ids)
        span = Span(str(self.header.record), 0, len(unread.token_ids))
        return self.engine.encode(EncodePlan((unread,), (span,)))

    def encode_all(self, memories: Sequence[Memory]) -> None:
        """Make records of header and facts in one pass: exactly what a plan of all of them is served with."""
        assert self.encode_header().encoded
        report = self.encode(memories)
        assert report.encoded == tuple(memory.record for memory in memories), report

    def ask(self, plan: PromptPlan, sampling: Sampling = GREEDY) -> Answer:
        """One answer, its report checked against the prompt's length."""
        return collect(list(self.engine.generate(plan, sampling)), plan)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(text, literal=True))


def plain(plan: PromptPlan) -> PromptPlan:
    """The same tokens, as text that knows of no records."""
    return PromptPlan((Segment("text", tuple(plan.token_ids)),))


def collect(chunks: Sequence[Chunk], plan: PromptPlan, index: int = 0) -> Answer:
    """One of the answers that chunks hold; checks what must be true of every stream of chunks."""
    reports = [chunk.report for chunk in chunks if chunk.report is not None]
    assert len(reports) == 1, f"{len(reports)} reports in one answer"
    assert chunks[-1].report is not None, "the report is not on the last chunk"
    report = reports[0]
    assert report.tokens_injected + report.tokens_prefilled == len(plan.token_ids), report
    assert report.tokens_prefilled >= 1, report
    assert report.facts_injected <= len(plan.facts), report
    assert report.ttft_ms is not None and report.ttft_ms > 0, report
    mine = [chunk for chunk in chunks if chunk.index == index]
    reasons = [chunk.finish_reason for chunk in mine if chunk.finish_reason is not None]
    assert len(reasons) == 1 and mine[-1].finish_reason is not None, "an answer ends once, with its last chunk"
    logprobs = next((chunk.logprobs[0] for chunk in mine if chunk.logprobs), {})
    return Answer(
        text="".join(chunk.text for chunk in mine),
        tokens=tuple(token for chunk in mine for token in chunk.token_ids),
        logprobs=dict(logprobs),
        finish_reason=reasons[0],
        report=report,
    )


def difference(ours: Answer, theirs: Answer) -> float:
    """Largest difference of two first tokens' log-probs."""
    assert ours.logprobs.keys() == theirs.logprobs.keys()
    return max(abs(value - theirs.logprobs[token]) for token, value in ours.logprobs.items())


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    """Fails unless the block raises an error of this kind."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
