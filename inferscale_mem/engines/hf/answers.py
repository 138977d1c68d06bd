"""The n answers of one request, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferscale_mem.engines.hf.cache import RecordingCache
from inferscale_mem.engines.hf.guided import Guide
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.engines.hf.sampling import Sampler, top_logprobs
from inferscale_mem.engines.text import AnswerText
from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.types import Chunk, Sampling


class Answer:
    """One answer as it grows.

    Args:
        index: which of the request's answers it is.
        prompt: token ids.
        sampling: with defaults filled in and max_tokens set.
        tokenizer: of the model.
        end_tokens: any of them ends the answer.
        guide: constrains it; None if nothing does.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        sampling: Sampling,
        tokenizer: ChatTokenizer,
        end_tokens: Sequence[int],
        guide: Guide | None,
    ) -> None:
        self.index = index
        self._sampling = sampling
        self._guide = guide
        self._sampler = Sampler(sampling, prompt, index, end_tokens)
        self._text = AnswerText(tokenizer, sampling, end_tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids so far."""
        return self._text.tokens

    def add(self, logits: torch.Tensor) -> Chunk:
        """Choose the next token from logits [vocab] float32."""
        adjusted = self._sampler.adjust(logits, self.tokens)
        if self._guide is not None:
            self._guide.mask(adjusted)
        token = self._sampler.choose(adjusted)
        complete = self._guide is not None and self._guide.accept(token)
        text, reason = self._text.add(token, complete)
        wanted = self._sampling.logprobs
        logprobs = None if wanted is None else (top_logprobs(logits, token, wanted),)
        return Chunk(self.index, text, (token,), logprobs, reason)


class Answers:
    """All answers of one request, sharing one prompt and one batch.

    Args:
        model: computes the next tokens.
        cache: of the prompt, batch size 1.
        logits: of the prompt's last position, [1, vocab].
        answers: fresh.
    """

    def __init__(self, model: HFModel, cache: RecordingCache, logits: torch.Tensor, answers: Sequence[Answer]) -> None:
        self._model = model
        self._cache = cache
        self._live = list(answers)
        self._logits: torch.Tensor | None = logits.expand(len(answers), -1)
        if len(answers) > 1:
            cache.batch_repeat_interleave(len(answers))

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return not self._live

    def step(self) -> list[Chunk]:
        """One more token for each answer that has not ended."""
        logits = self._logits
        if logits is None:
            logits = self._model.forward([[answer.tokens[-1]] for answer in self._live], self._cache)
        chunks = [answer.add(row) for answer, row in zip(self._live, logits, strict=True)]
        going = [i for i, chunk in enumerate(chunks) if chunk.finish_reason is None]
        if 0 < len(going) < len(self._live):
            self._cache.batch_select_indices(torch.tensor(going, device=self._model.device))
        self._live = [self._live[i] for i in going]
        self._logits = None
        return chunks
