"""The engine on Hugging Face transformers, in this process: for machines without vLLM, and as the oracle in tests.

All model work runs in one worker thread, a step at a time, so requests that are under way at once take turns. What a
request may inject is decided on the engine's own loop, by the same directory as in the vLLM connector.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from inferscale_mem.config import AUTO, EngineConfig
from inferscale_mem.engines import requests
from inferscale_mem.engines.base import EngineBase
from inferscale_mem.engines.hf.answers import Answer, Answers
from inferscale_mem.engines.hf.cache import RecordingCache
from inferscale_mem.engines.hf.guided import Guides
from inferscale_mem.engines.hf.identity import fingerprint
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.engines.hf.records import RecordBytes, bytes_per_token
from inferscale_mem.engines.hf.sampling import with_defaults
from inferscale_mem.engines.hf.self_test import run_self_test
from inferscale_mem.engines.requests import Injection
from inferscale_mem.errors import BudgetError, ConfigError, EngineClosedError, EngineError, InferScaleError, InputError
from inferscale_mem.handles import verify_tag
from inferscale_mem.kv.directory import Directory, Record
from inferscale_mem.kv.preamble import Preamble
from inferscale_mem.kv.slab import PAGE_SIZE
from inferscale_mem.tokenizer import HFChatTokenizer, load_tokenizer
from inferscale_mem.types import (
    Chunk,
    EncodePlan,
    EncodeReport,
    EngineInfo,
    EngineStatus,
    InjectReport,
    PromptPlan,
    Sampling,
    Span,
)

T = TypeVar("T")

PREFILL_TOKENS = 1024
"""Prompt tokens computed at once, unless engine.max_batched_tokens says otherwise: bounds memory, lets others in."""


class TransformersEngine(EngineBase):
    """``protocols.Engine``, and ``Scorer``, on transformers.

    Args:
        model: local path or Hugging Face id.
        config: ``max_model_len``, ``dtype``, ``record_bytes``, ``record_dtype``, ``preamble``, ``connector``,
            ``self_test`` and ``max_batched_tokens`` are heeded; the rest is about vLLM's scheduler and paged cache,
            which are not here.
        key: signs handles; tags are checked with it when a fact is encoded. None: tags are not checked by the engine.

    Raises:
        ConfigError: ``config.extra`` is not empty, or a setting does not fit the model.
        ModelError: the model cannot be found or read.
        UnsupportedModelError: its KV cannot be stored and moved; the reasons are listed.
        SelfTestError: injected answers differ from plain ones.
        BudgetError: the preamble does not fit.
    """

    def __init__(self, model: str, config: EngineConfig | None = None, key: bytes | None = None) -> None:
        config = config or EngineConfig(kind="transformers")
        if config.extra:
            raise ConfigError("engine.extra holds arguments of vLLM; leave it empty with the transformers engine.")
        self._model = HFModel(model, config)
        self._tokenizer = load_tokenizer(model)
        self._prefill_tokens = config.max_batched_tokens or PREFILL_TOKENS
        self._end_tokens = self._model.end_tokens(self._tokenizer.eos_token_id)
        self._guides = Guides(self._tokenizer.hf, self._model.vocab_size, self._end_tokens)
        self._preamble = Preamble.open(config.preamble) if config.preamble and config.connector else None
        if self._preamble is not None:
            self._preamble.check(self._tokenizer.digest)
        self._info = self._describe(config, key)
        if config.connector and config.self_test:
            run_self_test(self._model, config.record_dtype)
        self._directory, self._bytes = self._allocate(key)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inferscale-transformers-model")
        super().__init__("inferscale-transformers")

    def _describe(self, config: EngineConfig, key: bytes | None) -> EngineInfo:
        model, dtype = self._model, str(self._model.dtype).removeprefix("torch.")
        kept = () if config.record_dtype == AUTO else (config.record_dtype,)
        preamble = self._preamble.segment if self._preamble else None
        behind = (str(preamble.record),) if preamble else ()
        return EngineInfo(
            model=model.path,
            fingerprint=fingerprint(model.path, "transformers", dtype, str(model.max_model_len), *kept, *behind),
            max_model_len=model.max_model_len,
            block_size=1,
            dtype=dtype,
            bytes_per_token=bytes_per_token(model.layers, model.dtype, config.record_dtype),
            record_bytes=config.record_bytes if config.connector else 0,
            connector=config.connector,
            verifies_handles=config.connector and key is not None,
            version=f"transformers {transformers.__version__}",
            record_dtype=config.record_dtype,
            preamble=preamble,
        )

    def _allocate(self, key: bytes | None) -> tuple[Directory, RecordBytes]:
        page_bytes = PAGE_SIZE * self._info.bytes_per_token
        pages = self._info.record_bytes // page_bytes if page_bytes else 0
        verify = functools.partial(verify_tag, key) if key is not None else None
        data = RecordBytes(self._model.layers, pages, self._model.dtype, self._model.device, self._info.record_dtype)
        directory = Directory(pages, PAGE_SIZE, page_bytes, verify)
        if self._preamble is not None:
            segment = self._preamble.segment
            directory.install(str(segment.record), segment.token_ids)
            data.install(self._preamble.load([(s.num_kv_heads, s.head_size) for s in self._model.layers]))
        return directory, data

    @property
    def info(self) -> EngineInfo:
        """See protocols.Engine."""
        return self._info

    @property
    def model(self) -> HFModel:
        """What it runs; not to be used while the engine works."""
        return self._model

    @property
    def tokenizer(self) -> HFChatTokenizer:
        """See protocols.Engine."""
        return self._tokenizer

    async def _encode(self, plan: EncodePlan) -> EncodeReport:
        requests.check_encode(plan, self._model.max_model_len, self._model.vocab_size)
        if not self._info.connector:
            return EncodeReport((), {span.record: requests.OFF for span in plan.spans}, 0, 0)
        context = requests.find_context(self._directory, plan)
        self._directory.pin(context.records)
        making: list[tuple[Span, Record]] = []
        try:
            refused = self._reserve(plan, making)
            if not making:
                return EncodeReport((), refused, 0, 0)
            end = making[-1][0].end
            cache = self._model.new_cache(record=True)
            await self._prefill(plan.token_ids[:end], context, cache)
            encoded = await self._keep(making, cache)
        finally:
            self._directory.unpin(context.records)
            for _, record in making:
                self._directory.abandon(record.generation)
        self._directory.counters["tokens_injected"] += context.tokens
        refused.update({span.record: requests.DROPPED for span, _ in making if span.record not in encoded})
        based_on = tuple(record.name for record in context.records)
        return EncodeReport(encoded, refused, end - context.tokens, context.tokens, based_on)

    def _reserve(self, plan: EncodePlan, making: list[tuple[Span, Record]]) -> dict[str, str]:
        """Pages for every span, appended to ``making``; returns why some got none."""
        tokens = plan.token_ids
        refused = {}
        for span in plan.spans:
            try:
                record = self._directory.reserve(
                    span.record, tokens[span.start : span.end], span.handle, span.scope, plan.store
                )
            except BudgetError as error:
                refused[span.record] = str(error)
            else:
                making.append((span, record))
        return refused

    async def _keep(self, making: Sequence[tuple[Span, Record]], cache: RecordingCache) -> tuple[str, ...]:
        """Write what was captured, and publish it; returns the record ids."""
        # Pages of a record that was dropped meanwhile may be somebody else's. The worker takes jobs in order, so what
        # is dropped after this line is overwritten only after it was written.
        jobs = [(record.pages, span.start, span.end) for span, record in making if not record.dropped]
        await self._run(functools.partial(self._bytes.store_all, jobs, cache))
        encoded = []
        for _, record in making:
            if not record.dropped:
                self._directory.publish(record.generation)
                encoded.append(record.name)
        return tuple(encoded)

    async def _generate(self, plan: PromptPlan, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        started = time.perf_counter()
        sampling = with_defaults(sampling, self._model.generation_config)
        max_tokens = requests.check_generate(plan, sampling, self._model.max_model_len, self._model.vocab_size)
        if sampling.prompt_logprobs is not None:
            raise InputError("The transformers engine does not give prompt_logprobs; use the vLLM engine.")
        sampling = replace(sampling, max_tokens=max_tokens)
        injection = self._find_records(plan)
        requests.count(self._directory, injection)
        answers = await self._start(plan, sampling, injection)
        ttft_ms = None
        while not answers.done:
            chunks = await self._run(answers.step)
            ttft_ms = ttft_ms or 1000 * (time.perf_counter() - started)
            if answers.done:
                chunks[-1] = replace(chunks[-1], report=requests.report(plan, injection, ttft_ms))
            for chunk in chunks:
                yield chunk

    def _find_records(self, plan: PromptPlan) -> Injection:
        if not self._info.connector:
            return requests.without_connector(plan)
        return requests.find_records(self._directory, plan)

    async def _start(self, plan: PromptPlan, sampling: Sampling, injection: Injection) -> Answers:
        """Inject, prefill the rest of the prompt, and get ready for the first token."""
        prompt, schema = plan.token_ids, sampling.json_schema
        guides = await self._run(lambda: self._guides.make(schema, sampling.n)) if schema is not None else []
        logits, cache = await self._prompt(prompt, injection)
        answers = [
            Answer(i, prompt, sampling, self._tokenizer, self._end_tokens, guides[i] if guides else None)
            for i in range(sampling.n)
        ]
        return Answers(self._model, cache, logits, answers)

    def score(self, plan: PromptPlan, answer: Sequence[int]) -> tuple[NDArray[np.float32], InjectReport]:
        """See protocols.Scorer. One forward pass over the answer, behind the prompt."""
        return self._submit(self._score(plan, tuple(answer))).result()

    async def _score(self, plan: PromptPlan, answer: tuple[int, ...]) -> tuple[NDArray[np.float32], InjectReport]:
        requests.check_score(plan, answer, self._model.max_model_len, self._model.vocab_size)
        injection = self._find_records(plan)
        requests.count(self._directory, injection)
        logits, cache = await self._prompt(plan.token_ids, injection)
        given = [answer[:-1]] if len(answer) > 1 else []
        if given:
            rest = await self._run(lambda: self._model.forward_last(given, cache, len(given[0])))
            logits = torch.cat([logits, rest[0]])
        scores: NDArray[np.float32] = logits.log_softmax(-1).numpy()
        return scores, requests.report(plan, injection, None)

    async def _prompt(self, prompt: Sequence[int], injection: Injection) -> tuple[torch.Tensor, RecordingCache]:
        """Inject, and compute the rest of a prompt: its last position's logits [1, vocab], and its cache."""
        cache = self._model.new_cache()
        self._directory.pin(injection.records)
        try:
            return await self._prefill(prompt, injection, cache), cache
        finally:
            self._directory.unpin(injection.records)

    async def _prefill(self, prompt: Sequence[int], injection: Injection, cache: RecordingCache) -> torch.Tensor:
        """Fill an empty cache with records and the computed rest of a prompt; returns the last position's logits."""
        if injection.records:
            lengths = [len(record.token_ids) for record in injection.records]
            lengths[-1] -= sum(lengths) - injection.tokens
            pages = [record.pages for record in injection.records]
            await self._run(lambda: self._bytes.inject(pages, lengths, cache))
        logits = None
        for start in range(injection.tokens, len(prompt), self._prefill_tokens):
            part = prompt[start : start + self._prefill_tokens]
            logits = await self._run(functools.partial(self._model.forward, [part], cache))
        assert logits is not None, "at least one token is always computed"
        return logits

    async def _drop(self, handles: Sequence[str], alive: Collection[str]) -> None:
        self._directory.drop(handles)

    async def _status(self) -> EngineStatus:
        directory = self._directory
        return EngineStatus(directory.records, directory.tokens, directory.bytes, dict(directory.counters))

    async def _close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """See protocols.Engine."""
        super().close()
        # Only now has everything stopped that could still look at them.
        for name in ("_model", "_bytes"):
            self.__dict__.pop(name, None)

    async def _run(self, job: Callable[[], T]) -> T:
        """Do model work in the worker thread, after all that was asked for before."""
        if self._closed:
            raise EngineClosedError("The engine is closed; open a new one.")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, job)
        except asyncio.CancelledError:
            if self._closed:
                raise EngineClosedError("The engine was closed while it worked on this; open a new one.") from None
            raise
        except InferScaleError:
            raise
        except Exception as error:  # torch raises many kinds, out of memory among them
            raise EngineError(f"The model failed: {error}") from error
