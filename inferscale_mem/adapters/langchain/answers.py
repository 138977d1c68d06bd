"""An engine's chunks as LangChain's messages, whole and in streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.types import Chunk, InjectReport


@dataclass
class _Answer:
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class Answers:
    """Gathers one request's chunks.

    Args:
        tokenizer: spells out the tokens of log-probs.
        model: name of the model, for the metadata.
        prompt_tokens: length of the whole prompt, injected or not.
    """

    def __init__(self, tokenizer: ChatTokenizer, model: str, prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._answers: dict[int, _Answer] = {}
        self._output_tokens = 0
        self._report: InjectReport | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in the next chunk."""
        answer = self._answers.setdefault(chunk.index, _Answer())
        answer.text.append(chunk.text)
        answer.finish_reason = chunk.finish_reason or answer.finish_reason
        self._output_tokens += len(chunk.token_ids)
        self._report = chunk.report or self._report
        if chunk.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + self._spell(chunk)

    def stream(self, chunk: Chunk) -> ChatGenerationChunk | None:
        """Take in the next chunk of a single answer; what to hand on at once. Usage and metadata come with the last."""
        self.add(chunk)
        message = AIMessageChunk(content=chunk.text)
        if chunk.logprobs is not None:
            message.response_metadata = {"logprobs": {"content": self._spell(chunk)}}
        if chunk.report is not None:
            message.response_metadata |= self._metadata(self._answers[chunk.index])
            message.usage_metadata = self._usage()
            message.chunk_position = "last"
        elif not chunk.text and chunk.logprobs is None:
            return None
        return ChatGenerationChunk(message=message)

    def result(self) -> ChatResult:
        """The finished answers, in order. The request's usage is on the first, so that it is not counted n times."""
        generations = []
        for position, (_, answer) in enumerate(sorted(self._answers.items())):
            metadata = self._metadata(answer)
            if answer.logprobs is not None:
                metadata["logprobs"] = {"content": answer.logprobs}
            message = AIMessage(
                content="".join(answer.text),
                response_metadata=metadata,
                usage_metadata=self._usage() if position == 0 else None,
            )
            generations.append(ChatGeneration(message=message))
        return ChatResult(generations=generations, llm_output={"model_name": self._model})

    def _metadata(self, answer: _Answer) -> dict[str, Any]:
        assert self._report is not None, "the engine's last chunk carries the report"
        return {
            "model_name": self._model,
            "finish_reason": answer.finish_reason,
            "inferscale": self._report.as_dict(),
        }

    def _usage(self) -> UsageMetadata:
        assert self._report is not None, "the engine's last chunk carries the report"
        return UsageMetadata(
            input_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            total_tokens=self._prompt_tokens + self._output_tokens,
            input_token_details=InputTokenDetails(cache_read=self._report.tokens_injected),
        )

    def _spell(self, chunk: Chunk) -> list[dict[str, Any]]:
        pairs = zip(chunk.token_ids, chunk.logprobs or (), strict=True)
        return [
            self._entry(token, table) | {"top_logprobs": [self._entry(other, table) for other in _best_first(table)]}
            for token, table in pairs
        ]

    def _entry(self, token: int, table: Mapping[int, float]) -> dict[str, Any]:
        return {"token": self._tokenizer.decode([token]), "token_id": token, "logprob": table[token]}


def _best_first(table: Mapping[int, float]) -> list[int]:
    return sorted(table, key=lambda token: -table[token])
