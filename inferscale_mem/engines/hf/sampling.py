"""From logits to tokens: penalties, temperature, truncation, seeds. The order of steps is vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from inferscale_mem.types import Sampling

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation config may set for requests that leave it open."""


def with_defaults(sampling: Sampling, generation_config: Mapping[str, object]) -> Sampling:
    """``sampling`` with what it leaves open taken from the model's generation config."""
    found = {
        name: generation_config[name]
        for name in GENERATION_DEFAULTS
        if getattr(sampling, name) is None and generation_config.get(name) is not None
    }
    return dataclasses.replace(sampling, **found)  # type: ignore[arg-type]


class Sampler:
    """Chooses the next token of one answer.

    Args:
        sampling: with defaults filled in.
        prompt: token ids of the prompt, which the repetition penalty counts.
        index: which of the n answers this is; each has random numbers of its own.
        end_tokens: tokens that end an answer: not before min_tokens.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], index: int, end_tokens: Sequence[int]) -> None:
        self._sampling = sampling
        self._seen = torch.tensor(sorted(set(prompt)), dtype=torch.int64)
        self._end_tokens = list(end_tokens)
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed((sampling.seed + index) % (1 << 63))

    def adjust(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] with penalties and end-of-answer rules, before temperature. Works on a copy.

        Args:
            logits: float32, on the CPU.
            answer: token ids so far.
        """
        logits = logits.clone()
        if len(answer) < self._sampling.min_tokens:
            logits[self._end_tokens] = -torch.inf
        self._penalise(logits, answer)
        return logits

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from adjusted (and masked) logits [vocab]."""
        temperature = 1.0 if self._sampling.temperature is None else self._sampling.temperature
        if temperature < 1e-5:
            return int(logits.argmax())
        probabilities = truncate(logits / temperature, self._sampling).softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._random))

    def _penalise(self, logits: torch.Tensor, answer: Sequence[int]) -> None:
        sampling = self._sampling
        told, counts = torch.unique(torch.tensor(list(answer), dtype=torch.int64), return_counts=True)
        if sampling.repetition_penalty not in (None, 1.0):
            seen = torch.unique(torch.cat((self._seen, told)))
            scores = logits[seen]
            penalty = sampling.repetition_penalty
            logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if sampling.frequency_penalty:
            logits[told] -= sampling.frequency_penalty * counts
        if sampling.presence_penalty:
            logits[told] -= sampling.presence_penalty


def truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [vocab] with tokens outside min_p, top_k and top_p at -inf; the most likely one always stays."""
    if sampling.min_p:
        probabilities = logits.softmax(dim=-1)
        logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
    if sampling.top_k is not None and 0 < sampling.top_k < logits.numel():
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        share = ordered.softmax(dim=-1)
        outside = share.cumsum(dim=-1) - share >= sampling.top_p
        logits = logits.masked_fill(outside.scatter(0, order, outside), -torch.inf)
    return logits


def top_logprobs(logits: torch.Tensor, token: int, count: int) -> dict[int, float]:
    """Log-probabilities of the model itself, before any of the above.

    Args:
        logits: [vocab] float32.
        token: the chosen token, always included.
        count: how many of the most likely to give; -1 for all.
    """
    scores = logits.log_softmax(dim=-1)
    if count < 0:
        return dict(enumerate(scores.tolist()))
    values, tokens = scores.topk(min(count, scores.numel()))
    found = dict(zip(tokens.tolist(), values.tolist(), strict=True))
    return {**found, token: float(scores[token])}
