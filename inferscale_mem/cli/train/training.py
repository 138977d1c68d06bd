"""The optimisation: a preamble's keys and values against plain prefill. The model is frozen.

A step takes one question. The facts it is served with are encoded behind the preamble and the records of the facts they
stand on, as the product does; then question and right answer are read behind the records. The loss is the divergence
from what the model says behind the same facts as plain text. Prefix tuning (Li and Liang, arXiv:2101.00190), with plain
prefill as the teacher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inferscale_mem.cli.train.lessons import Fact, Lesson, Lessons
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.engines.hf.records import LayerShape
from inferscale_mem.kernels.rope import reference

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys before RoPE and values of each layer, [T, num_kv_heads, head_size]."""

QUESTION_WEIGHT = 0.3
"""Of the divergence over the question's tokens, beside that over the answer's."""
AT_ONCE = 10
"""Facts of a question that are encoded again in a step; of the others the latest record is taken."""
WARM_UP = 10
BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class Step:
    """What one step saw.

    Attributes:
        k: facts searched for.
        loss: with the preamble as it was.
    """

    k: int
    loss: float


class Trainer:
    """Holds the preamble and the latest records.

    Args:
        model: loaded with its connector on.
        lessons: what to learn from.
        rate: Adam's, at its highest; falls to 0 over the steps.
        seed: of the order of lessons.

    Attributes:
        preamble: as it is now; begins as the header's own keys and values.
    """

    def __init__(self, model: HFModel, lessons: Lessons, rate: float, seed: int = 0) -> None:
        self._model, self._lessons, self._rate = model, lessons, rate
        self._random = random.Random(seed)
        with torch.no_grad():
            self._header = self._run(lessons.header, [])[1]
        self.preamble: Layers = [
            (keys.float().clone().requires_grad_(), values.float().clone().requires_grad_())
            for keys, values in self._header
        ]
        self._optimiser = torch.optim.Adam([part for layer in self.preamble for part in layer], rate, betas=BETAS)
        self._records: list[Layers] = []

    def prepare(self, say: Callable[[int], None]) -> None:
        """Encode all facts once; ``say`` is told how many there are."""
        with torch.no_grad():
            for number, fact in enumerate(self._lessons.facts):
                say(number)
                self._records.append(self._encode(fact))

    def train(self, steps: int, after: Callable[[int, Step], None]) -> None:
        """Take so many steps; ``after`` is told of each."""
        for number in range(steps):
            for group in self._optimiser.param_groups:
                group["lr"] = self._rate * min(1.0, (number + 1) / WARM_UP) * (1 - number / steps)
            k = self._random.choice(sorted(self._lessons.by_k))
            after(number, Step(k, self._step(self._random.choice(self._lessons.by_k[k]))))

    def _step(self, lesson: Lesson) -> float:
        behind = (*lesson.question, *lesson.answer)
        with torch.no_grad():
            text = [token for fact in lesson.facts for token in self._lessons.facts[fact].token_ids]
            wanted = self._run((*self._lessons.header, *text, *behind), [], len(behind))[0]
        chosen = self._random.sample(lesson.facts, min(AT_ONCE, len(lesson.facts)))
        made = {number: self._encode(self._lessons.facts[number]) for number in chosen}
        records = [made.get(number, self._records[number]) for number in lesson.facts]
        loss = _divergence(wanted, self._run(behind, [self._header, *records], len(behind))[0], len(lesson.answer))
        self._optimiser.zero_grad()
        # So that the gradient is, on average, what it would be had all of them been encoded again.
        torch.autograd.backward(loss * len(lesson.facts) / len(chosen))
        self._optimiser.step()
        for number, record in made.items():
            self._records[number] = [(keys.detach(), values.detach()) for keys, values in record]
        return float(loss.detach())

    def _encode(self, fact: Fact) -> Layers:
        return self._run(fact.token_ids, [self.preamble, *(self._records[number] for number in fact.context)])[1]

    def _run(self, tokens: Sequence[int], context: Sequence[Layers], logits: int = 1) -> tuple[torch.Tensor, Layers]:
        """Logits of the last positions, and what the layers keep of ``tokens``, read behind the context's records."""
        cache = self._model.new_cache(record=True)
        start = sum(len(part[0][0]) for part in context)
        device, dtype = self._model.device, self._model.dtype
        before, own = torch.arange(start, device=device), torch.arange(start, start + len(tokens), device=device)
        for number, layer in enumerate(self._model.layers if context else ()):
            keys, values = (torch.cat([part[number][i].to(dtype) for part in context]) for i in (0, 1))
            cache.inject(number, _turn(keys, before, layer).to(dtype), values)
        found = self._model.run([tokens], cache, logits)[0].float()
        kept = [cache.recorded(number, start, start + len(tokens)) for number in range(len(self._model.layers))]
        plain = [
            (_turn(keys, own, layer, back=True).to(dtype), values)
            for (keys, values), layer in zip(kept, self._model.layers, strict=True)
        ]
        return found, plain


def _turn(keys: torch.Tensor, positions: torch.Tensor, layer: LayerShape, *, back: bool = False) -> torch.Tensor:
    """Rotate keys to positions, or back, in a form that gradients pass through."""
    if layer.rope is None:
        return keys
    cos, sin = layer.rope.at(positions)
    if back:
        cos, sin = reference.inverse(cos, sin)
    return reference.rotate(keys, cos, sin, layer.rope.is_neox_style)


def _divergence(wanted: torch.Tensor, got: torch.Tensor, answer: int) -> torch.Tensor:
    """KL, mean over the positions that an answer's tokens are told from, plus some of the mean over those before."""
    p, q = wanted.log_softmax(-1), got.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)[:-1]  # the last position tells what follows the answer
    return kl[-answer:].mean() + QUESTION_WEIGHT * kl[:-answer].mean()
