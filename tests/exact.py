"""Asking an engine for whole distributions, and measuring how far apart two of them are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferscale_mem.protocols import Engine
from inferscale_mem.types import EncodePlan, InjectReport, PromptPlan, Sampling, Scope, Segment, Span

FIRST_TOKEN = Sampling(max_tokens=1, temperature=0.0, logprobs=-1)
OWNER = Scope(user_id="alice")


@dataclass(frozen=True)
class First:
    """Log-probs of a prompt's first token over the whole vocabulary [V] float64, and what the engine reported."""

    logprobs: torch.Tensor
    report: InjectReport

    def max_difference(self, other: First) -> float:
        """Largest difference of log-probs, over tokens that either gives more than e^-30."""
        likely = (self.logprobs > -30) | (other.logprobs > -30)
        return float((self.logprobs - other.logprobs)[likely].abs().max())

    def kl(self, other: First) -> float:
        """KL divergence of ``other`` from this, in nats."""
        return float((self.logprobs.exp() * (self.logprobs - other.logprobs)).nan_to_num(0.0).sum())


def first_token(engine: Engine, segments: Sequence[Segment], scope: Scope | None = OWNER, store: str = "") -> First:
    """The distribution an engine gives for a prompt's first token."""
    chunks = list(engine.generate(PromptPlan(tuple(segments), scope, store), FIRST_TOKEN))
    found = next(chunk.logprobs for chunk in chunks if chunk.logprobs)[0]
    logprobs = torch.full((max(found) + 1,), float("-inf"), dtype=torch.float64)
    logprobs[list(found)] = torch.tensor(list(found.values()), dtype=torch.float64)
    report = chunks[-1].report
    assert report is not None
    return First(logprobs, report)


def plain(segments: Sequence[Segment]) -> list[Segment]:
    """The same tokens with nothing to inject."""
    return [Segment("text", segment.token_ids) for segment in segments]


def encode(engine: Engine, context: Sequence[Segment], *new: Segment) -> None:
    """Make records of ``new`` segments in one pass behind a context; all of them must come to be."""
    segments = (*context, *new)
    spans, position = [], sum(len(segment.token_ids) for segment in context)
    for segment in new:
        assert segment.record is not None
        spans.append(Span(segment.record, position, position + len(segment.token_ids)))
        position += len(segment.token_ids)
    report = engine.encode(EncodePlan(segments, tuple(spans), OWNER))
    assert not report.refused and set(report.encoded) == {segment.record for segment in new}, report


def material(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """Random tokens, the special ones at the ends of the vocabulary left out."""
    return tuple(random.Random(seed).choices(range(10, min(vocab_size, 250)), k=count))
