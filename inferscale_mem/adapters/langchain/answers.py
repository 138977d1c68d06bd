"""An engine's chunks as LangChain's messages, whole and in streams."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCall, ToolCallChunk, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.reading import AnswerReader, Call, Piece, Reading, Reasoning, Text
from inferscale_mem.tool_template import ID_LENGTH
from inferscale_mem.types import Chunk, InjectReport, PromptPlan

PROVIDER = "inferscale"


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class _Answer:
    """One of a request's answers as it grows."""

    def __init__(self, reading: Reading) -> None:
        self._reader = AnswerReader(reading)
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[_Call] = []
        self.finish_reason: str | None = None
        self.logprobs: list[dict[str, Any]] | None = None

    def add(self, chunk: Chunk) -> AIMessageChunk:
        """Take in the next chunk; what it adds to the message."""
        pieces = list(self._reader.add(chunk.text))
        if chunk.finish_reason is not None:
            pieces += self._reader.finish()
        message = AIMessageChunk(content="", tool_call_chunks=list(self._call_chunks(pieces)))
        text = [piece.text for piece in pieces if isinstance(piece, Text)]
        reasoning = [piece.text for piece in pieces if isinstance(piece, Reasoning)]
        self.text += text
        self.reasoning += reasoning
        message.content = "".join(text)
        if reasoning:
            message.additional_kwargs["reasoning_content"] = "".join(reasoning)
        if chunk.finish_reason is not None:
            called = bool(self.calls) and chunk.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else chunk.finish_reason
        return message

    def _call_chunks(self, pieces: Iterable[Piece]) -> Iterable[ToolCallChunk]:
        """One chunk a call: LangChain does not join two of one call within a message."""
        chunks: dict[int, ToolCallChunk] = {}
        for piece in pieces:
            if not isinstance(piece, Call):
                continue
            if piece.name is not None:
                self.calls.append(_Call(_new_id(), piece.name))
            call = self.calls[piece.index]
            call.arguments.append(piece.arguments)
            known = chunks.get(piece.index)
            if known is not None:
                known["args"] = (known["args"] or "") + piece.arguments
                continue
            id_ = call.id if piece.name is not None else None
            chunks[piece.index] = tool_call_chunk(name=piece.name, args=piece.arguments, id=id_, index=piece.index)
        return chunks.values()

    def message(self) -> AIMessage:
        """The whole of it."""
        good: list[ToolCall] = []
        bad: list[InvalidToolCall] = []
        for call in self.calls:
            arguments = "".join(call.arguments)
            try:
                read = json.loads(arguments, strict=False)
            except ValueError as error:
                bad.append(_invalid(call, arguments, f"The arguments are no JSON: {error}"))
                continue
            if isinstance(read, dict) and call.name:
                good.append(tool_call(name=call.name, args=read, id=call.id))
            else:
                bad.append(_invalid(call, arguments, "The arguments are not a JSON object, or the tool has no name."))
        return AIMessage(
            content="".join(self.text),
            additional_kwargs={"reasoning_content": "".join(self.reasoning)} if self.reasoning else {},
            tool_calls=good,
            invalid_tool_calls=bad,
        )


class Answers:
    """Gathers one request's chunks.

    Args:
        tokenizer: spells out the tokens of log-probs.
        model: name of the model, for the metadata.
        plan: what was asked.
    """

    def __init__(self, tokenizer: ChatTokenizer, model: str, plan: PromptPlan) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._reading = plan.reading
        self._prompt_tokens = len(plan.token_ids)
        self._answers: dict[int, _Answer] = {}
        self._output_tokens = 0
        self._report: InjectReport | None = None

    def add(self, chunk: Chunk) -> AIMessageChunk:
        """Take in the next chunk; what it adds to its message."""
        answer = self._answers.get(chunk.index)
        if answer is None:
            answer = self._answers[chunk.index] = _Answer(self._reading)
        self._output_tokens += len(chunk.token_ids)
        self._report = chunk.report or self._report
        message = answer.add(chunk)
        if chunk.logprobs is not None:
            spelled = self._spell(chunk)
            answer.logprobs = (answer.logprobs or []) + spelled
            message.response_metadata["logprobs"] = {"content": spelled}
        return message

    def stream(self, chunk: Chunk) -> ChatGenerationChunk | None:
        """Take in the next chunk of a single answer; what to hand on at once. Usage and metadata come with the last."""
        message = self.add(chunk)
        if chunk.report is not None:
            message.response_metadata |= self._metadata(self._answers[chunk.index])
            message.usage_metadata = self._usage()
            message.chunk_position = "last"
        elif not (message.content or message.additional_kwargs or message.tool_call_chunks or chunk.logprobs):
            return None
        return ChatGenerationChunk(message=message)

    def result(self) -> ChatResult:
        """The finished answers, in order. The request's usage is on the first, so that it is not counted n times."""
        generations = []
        for position, (_, answer) in enumerate(sorted(self._answers.items())):
            message = answer.message()
            message.response_metadata = self._metadata(answer)
            if answer.logprobs is not None:
                message.response_metadata["logprobs"] = {"content": answer.logprobs}
            message.usage_metadata = self._usage() if position == 0 else None
            generations.append(ChatGeneration(message=message))
        return ChatResult(generations=generations, llm_output={"model_name": self._model})

    def _metadata(self, answer: _Answer) -> dict[str, Any]:
        assert self._report is not None, "the engine's last chunk carries the report"
        return {
            "model_name": self._model,
            "model_provider": PROVIDER,
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


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


def _invalid(call: _Call, arguments: str, error: str) -> InvalidToolCall:
    return InvalidToolCall(type="invalid_tool_call", name=call.name or None, args=arguments, id=call.id, error=error)
