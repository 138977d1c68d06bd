"""The engine protocol over ordinary requests that carry orders to the connector: what vLLM in this process and vLLM
behind HTTP have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_mem import wire
from inferscale_mem.engines.base import EngineBase
from inferscale_mem.engines.requests import check_encode, check_generate, check_score
from inferscale_mem.errors import EngineError
from inferscale_mem.tokenizer import HFChatTokenizer
from inferscale_mem.types import (
    Chunk,
    EncodePlan,
    EncodeReport,
    EngineInfo,
    EngineStatus,
    InjectReport,
    PromptPlan,
    Sampling,
)

ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Output:
    """What an engine says at once about a request.

    Attributes:
        chunks: new pieces of its answers; their reports are not filled in.
        answer: the connector's, when the request is finished.
        cached: tokens of the prompt that were not computed; None where it is not known.
    """

    chunks: tuple[Chunk, ...]
    answer: Mapping[str, Any] | None = None
    cached: int | None = None


Run = Callable[[list[int], Sampling, dict[str, Any], int], AsyncGenerator[Output, None]]
"""(token ids, sampling, kv_transfer_params, room for the answer) -> its outputs. Closing it aborts the request."""


class Requests:
    """Requests with orders, signed.

    Args:
        run: sends one.
        key: signs orders; None: they go unsigned.
    """

    def __init__(self, run: Run, key: bytes | None) -> None:
        self._run = run
        self._key = key

    async def run(
        self, tokens: list[int], sampling: Sampling, params: Mapping[str, Any], room: int = 1
    ) -> AsyncGenerator[Output, None]:
        """Outputs of one request; ``room`` is the longest answer possible."""
        outputs = self._run(tokens, sampling, wire.sign(params, tokens, self._key), room)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def order(self, tokens: Sequence[int], params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The connector's answer to a prompt that is only computed; None if there is no connector."""
        answer = None
        async for output in self.run(list(tokens), ONE_TOKEN, params):
            answer = output.answer or answer
        return answer

    async def ask(self, params: Mapping[str, Any], tokens: Sequence[int] = (0,)) -> Mapping[str, Any]:
        """As order.

        Raises:
            EngineError: there is no connector, or it refused the order.
        """
        answer = await self.order(tokens, params)
        if answer is None:
            raise EngineError(f"{wire.NO_CONNECTOR}, although it was configured; is this the tested vLLM version?")
        if "error" in answer:
            raise EngineError(f"the memory connector refused an order: {answer['error']}")
        return answer

    async def logprobs(self, tokens: list[int], params: Mapping[str, Any], top: int) -> tuple[Mapping[int, float], Any]:
        """First-token log-probs of a prompt, and the connector's answer."""
        answer: Mapping[str, Any] | None = None
        found: Mapping[int, float] = {}
        async for output in self.run(tokens, replace(ONE_TOKEN, logprobs=top, detokenize=False), params):
            answer = output.answer or answer
            for chunk in output.chunks:
                found = chunk.logprobs[0] if chunk.logprobs else found
        return found, answer

    async def report(self, ticket: str) -> Mapping[str, Any] | None:
        """The connector's answer to an earlier request that came to its end without one."""
        return await self.order((0,), wire.report_params(ticket))

    async def status(self) -> EngineStatus:
        """What the connector holds."""
        answer = await self.ask(wire.status_params())
        return EngineStatus(answer["records"], answer["tokens"], answer["bytes"], answer["counters"])


class RequestEngine(EngineBase):
    """Engine and Scorer over requests. A subclass sets ``_info``, ``_tokenizer``, ``_vocab_size`` and ``_requests``."""

    _info: EngineInfo
    _tokenizer: HFChatTokenizer
    _vocab_size: int
    _requests: Requests

    @property
    def info(self) -> EngineInfo:
        """See protocols.Engine."""
        return self._info

    @property
    def tokenizer(self) -> HFChatTokenizer:
        """See protocols.Engine."""
        return self._tokenizer

    async def _encode(self, plan: EncodePlan) -> EncodeReport:
        check_encode(plan, self._info.max_model_len - 1, self._vocab_size)
        if not self._info.connector:
            return EncodeReport((), {span.record: wire.NO_CONNECTOR for span in plan.spans}, 0, 0)
        return wire.encode_report(plan, await self._requests.order(plan.token_ids, wire.encode_params(plan)))

    async def _generate(self, plan: PromptPlan, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        room = check_generate(plan, sampling, self._info.max_model_len, self._vocab_size)
        ticket = wire.new_ticket()
        params = self._inject_params(plan, ticket)
        started, ttft_ms, answer, cached, waiting = time.perf_counter(), None, None, None, sampling.n
        last: Chunk | None = None
        async with contextlib.aclosing(self._requests.run(plan.token_ids, sampling, params, room)) as outputs:
            async for output in outputs:
                if ttft_ms is None:
                    ttft_ms, cached = 1000 * (time.perf_counter() - started), output.cached
                answer = output.answer or answer
                for chunk in output.chunks:
                    waiting -= chunk.finish_reason is not None
                    if waiting == 0:
                        last = chunk  # held back: the connector's answer may come behind it
                    else:
                        yield chunk
        if last is None:
            raise EngineError("The engine ended a request before its answer was complete; its log names the cause.")
        if answer is None and params:  # a stop string ended it
            answer = await self._requests.report(ticket)
        yield replace(last, report=replace(wire.inject_report(plan, answer, ttft_ms), tokens_cached=cached))

    def score(self, plan: PromptPlan, answer: Sequence[int]) -> tuple[NDArray[np.float32], InjectReport]:
        """See protocols.Scorer. One request of one token for each of the answer's places, all at once.

        vLLM gives probabilities of a prompt's own tokens only where it computes all of them, so never behind injected
        memories; but requests that inject the same records share their blocks in the prefix cache.
        """
        return self._submit(self._score(plan, tuple(answer))).result()

    async def _score(self, plan: PromptPlan, answer: tuple[int, ...]) -> tuple[NDArray[np.float32], InjectReport]:
        check_score(plan, answer, self._info.max_model_len, self._vocab_size)
        params, prompt = self._inject_params(plan), plan.token_ids
        prefixes = [[*prompt, *answer[:i]] for i in range(len(answer))]
        found = await asyncio.gather(*(self._requests.logprobs(prefix, params, -1) for prefix in prefixes))
        scores = np.full((len(answer), self._vocab_size), -np.inf, np.float32)
        for row, (logprobs, _) in zip(scores, found, strict=True):
            row[list(logprobs)] = list(logprobs.values())
        return scores, wire.inject_report(plan, found[0][1], None)

    def _inject_params(self, plan: PromptPlan, ticket: str = "") -> dict[str, Any]:
        asks = self._info.connector and any(segment.record for segment in plan.segments)
        return wire.inject_params(plan, ticket) if asks else {}

    async def _drop(self, handles: Sequence[str], alive: Collection[str]) -> None:
        if handles and self._info.connector:
            await self._requests.ask(wire.drop_params(handles, alive))

    async def _status(self) -> EngineStatus:
        return await self._requests.status() if self._info.connector else EngineStatus(0, 0, 0, {})
