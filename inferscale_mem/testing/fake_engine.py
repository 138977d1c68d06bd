"""An engine without a model: everything around the model is real, the answers are made up."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from inferscale_mem.engines import requests
from inferscale_mem.engines.base import EngineBase
from inferscale_mem.engines.requests import Injection
from inferscale_mem.engines.text import AnswerText
from inferscale_mem.errors import BudgetError, EngineClosedError
from inferscale_mem.handles import verify_tag
from inferscale_mem.kv.directory import Directory, Record
from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.testing import made_up
from inferscale_mem.testing.bytes_tokenizer import END, VOCAB_SIZE, BytesTokenizer
from inferscale_mem.types import Chunk, EncodePlan, EncodeReport, EngineInfo, EngineStatus, PromptPlan, Sampling

Answers = str | Sequence[str] | Callable[[PromptPlan, Sampling], str]
BYTES_PER_TOKEN = 64
PAGE_SIZE = 4


class FakeEngine(EngineBase):
    """``protocols.Engine`` that keeps records, matches, pins and evicts like the real ones, and computes nothing.

    Args:
        answers: given one after the other, the last one again and again; or a function of plan and sampling. None:
            every answer repeats the end of its prompt, or fits the JSON schema if there is one.
        max_model_len: tokens (bytes) of prompt and answer together.
        record_bytes: budget; a token takes 64 bytes.
        key: signs handles; None: tags are not checked.
        connector: False serves memories as plain text only.
        delay: seconds before the first token of an answer and before an encode is done.

    Attributes:
        requests: what was asked, in order of arrival: (plan, sampling).
        encodes: encode plans, likewise.
        drops: handles, likewise.
    """

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        max_model_len: int = 4096,
        record_bytes: int = 1 << 20,
        key: bytes | None = None,
        connector: bool = True,
        delay: float = 0.0,
    ) -> None:
        verify = functools.partial(verify_tag, key) if key is not None else None
        pages = record_bytes // (PAGE_SIZE * BYTES_PER_TOKEN) if connector else 0
        self._directory = Directory(pages, PAGE_SIZE, PAGE_SIZE * BYTES_PER_TOKEN, verify)
        self._info = EngineInfo(
            model="fake",
            fingerprint="fake",
            max_model_len=max_model_len,
            block_size=1,
            dtype="uint8",
            bytes_per_token=BYTES_PER_TOKEN if connector else 0,
            record_bytes=record_bytes if connector else 0,
            connector=connector,
            verifies_handles=connector and key is not None,
            version="fake 1",
        )
        self._tokenizer = BytesTokenizer()
        self._script = None if callable(answers) else deque([answers] if isinstance(answers, str) else answers or [])
        self._author = answers if callable(answers) else None
        self._failures: dict[str, deque[Exception]] = {"generate": deque(), "encode": deque()}
        self._encoding_allowed = threading.Event()
        self._encoding_allowed.set()
        self.delay = delay
        self.requests: list[tuple[PromptPlan, Sampling]] = []
        self.encodes: list[EncodePlan] = []
        self.drops: list[str] = []
        super().__init__("inferscale-fake")

    # What tests can tell it.

    def fail_next(self, error: Exception, on: Literal["generate", "encode"] = "generate") -> None:
        """Raise ``error`` at the next call; may be asked for several times."""
        self._failures[on].append(error)

    def pause_encoding(self) -> None:
        """Let encodes wait, their records unfinished, until ``resume_encoding``."""
        self._encoding_allowed.clear()

    def resume_encoding(self) -> None:
        """Undo ``pause_encoding``."""
        self._encoding_allowed.set()

    def evict_all(self) -> None:
        """Evict every record that no request is using, as pressure on the budget would."""
        self._submit(self._evict_all()).result()

    async def _evict_all(self) -> None:
        everything = [0] * (self._directory.num_pages * PAGE_SIZE)
        try:
            self._directory.abandon(self._directory.reserve("evict-all", everything, None, None, "").generation)
        except BudgetError:
            return  # records in use stay, all others went

    # The protocol.

    @property
    def info(self) -> EngineInfo:
        """See protocols.Engine."""
        return self._info

    @property
    def tokenizer(self) -> ChatTokenizer:
        """See protocols.Engine."""
        return self._tokenizer

    async def _encode(self, plan: EncodePlan) -> EncodeReport:
        requests.check_encode(plan, self._info.max_model_len, VOCAB_SIZE)
        self.encodes.append(plan)
        self._raise_planned("encode")
        if not self._info.connector:
            return EncodeReport((), {span.record: requests.OFF for span in plan.spans}, 0, 0)
        context = requests.find_context(self._directory, plan)
        self._directory.pin(context.records)
        making: list[Record] = []
        try:
            refused = self._reserve(plan, making)
            await self._wait(self.delay)
            while not self._encoding_allowed.is_set():
                await self._wait(0.001)
            kept = [record for record in making if not record.dropped]
            for record in kept:
                self._directory.publish(record.generation)
        finally:
            self._directory.unpin(context.records)
            for record in making:
                self._directory.abandon(record.generation)
        self._directory.counters["tokens_injected"] += context.tokens
        refused.update({record.name: requests.DROPPED for record in making if record not in kept})
        return EncodeReport(
            encoded=tuple(record.name for record in kept),
            refused=refused,
            tokens_prefilled=plan.spans[-1].end - context.tokens,
            tokens_injected=context.tokens,
            based_on=tuple(record.name for record in context.records),
        )

    def _reserve(self, plan: EncodePlan, making: list[Record]) -> dict[str, str]:
        refused, tokens = {}, plan.token_ids
        for span in plan.spans:
            ids = tokens[span.start : span.end]
            try:
                making.append(self._directory.reserve(span.record, ids, span.handle, span.scope, plan.store))
            except BudgetError as error:
                refused[span.record] = str(error)
        return refused

    async def _generate(self, plan: PromptPlan, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        started = time.perf_counter()
        max_tokens = requests.check_generate(plan, sampling, self._info.max_model_len, VOCAB_SIZE)
        self.requests.append((plan, sampling))
        self._raise_planned("generate")
        injection = self._find(plan)
        requests.count(self._directory, injection)
        self._directory.pin(injection.records)
        try:
            await self._wait(self.delay)
            ttft_ms = 1000 * (time.perf_counter() - started)
            pieces = self._speak(plan, replace(sampling, max_tokens=max_tokens))
            chunk = next(pieces)
            for following in pieces:
                yield chunk
                await asyncio.sleep(0)
                chunk = following
            yield replace(chunk, report=requests.report(plan, injection, ttft_ms))
        finally:
            self._directory.unpin(injection.records)

    def _find(self, plan: PromptPlan) -> Injection:
        if not self._info.connector:
            return requests.without_connector(plan)
        return requests.find_records(self._directory, plan)

    def _speak(self, plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        """All answers, token by token, in turns."""
        speakers = [(i, self._tokens(plan, sampling, i), self._text(sampling)) for i in range(sampling.n)]
        while speakers:
            going = []
            for index, tokens, text in speakers:
                token = next(tokens)
                new, reason = text.add(token)
                yield Chunk(index, new, (token,), made_up.logprobs(plan, token, sampling.logprobs), reason)
                if reason is None:
                    going.append((index, tokens, text))
            speakers = going

    def _text(self, sampling: Sampling) -> AnswerText:
        return AnswerText(self._tokenizer, sampling, [END])

    def _tokens(self, plan: PromptPlan, sampling: Sampling, index: int) -> Iterator[int]:
        tokens = self._tokenizer.encode(self._answer(plan, sampling, index), literal=True)
        return itertools.cycle([*tokens, END])

    def _answer(self, plan: PromptPlan, sampling: Sampling, index: int) -> str:
        if self._author is not None:
            return self._author(plan, sampling)
        if self._script:
            return self._script.popleft() if len(self._script) > 1 else self._script[0]
        if sampling.json_schema is not None:
            return made_up.example(sampling.json_schema)
        end = " ".join(self._tokenizer.decode(plan.token_ids[-60:]).split())
        variant = f" ({index})" if index else ""
        return f"You said: {end}{variant}"

    async def _drop(self, handles: Sequence[str], alive: Collection[str]) -> None:
        self.drops.extend(handles)
        self._directory.drop(handles)

    async def _status(self) -> EngineStatus:
        directory = self._directory
        return EngineStatus(directory.records, directory.tokens, directory.bytes, dict(directory.counters))

    async def _close(self) -> None:
        pass

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if self._closed:
                raise EngineClosedError("The engine was closed while it worked on this; open a new one.") from None
            raise

    def _raise_planned(self, on: str) -> None:
        if self._failures[on]:
            raise self._failures[on].popleft()
