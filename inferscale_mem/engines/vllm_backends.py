"""The two ways of running vLLM behind one small interface: in processes of its own, or stepped in this one."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from vllm import LLMEngine, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from inferscale_mem.errors import EngineError

SHUTDOWN_SECONDS = 20
"""Time for vLLM's processes to end by themselves, so that they leave no shared memory behind."""


class Backend(Protocol):
    """What both ways of running vLLM have in common."""

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        ...

    def generate(self, token_ids: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of one request; closing the generator aborts it."""
        ...

    def shutdown(self) -> None:
        """Stop the engine and its processes."""
        ...


class BesideBackend:
    """vLLM's AsyncLLM: engine core and workers in processes of their own."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._llm = AsyncLLM.from_vllm_config(
            vllm_config, usage_context=UsageContext.ENGINE_CONTEXT, disable_log_stats=True
        )

    @property
    def tokenizer(self) -> Any:
        return self._llm.renderer.get_tokenizer()

    async def generate(self, token_ids: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        prompt = {"prompt_token_ids": token_ids}
        outputs = self._llm.generate(prompt, params, request_id=uuid.uuid4().hex)  # type: ignore[arg-type]
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
        del self._llm  # its finaliser shuts down once more, which fails while the interpreter exits


class InProcessBackend:
    """vLLM's LLMEngine, stepped on the engine's own loop: everything in this process, good for debugging."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._engine = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        self._queues: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def tokenizer(self) -> Any:
        return self._engine.renderer.get_tokenizer()

    async def generate(self, token_ids: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        name = uuid.uuid4().hex
        queue = self._queues[name] = asyncio.Queue()
        finished = False
        try:
            self._engine.add_request(name, {"prompt_token_ids": token_ids}, params)
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.get_running_loop().create_task(self._step())
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise EngineError(f"vLLM failed: {output}") from output
                finished = output.finished
                yield output
        finally:
            del self._queues[name]
            if not finished:
                self._engine.abort_request([name])

    async def _step(self) -> None:
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if isinstance(output, RequestOutput) and output.request_id in self._queues:
                        self._queues[output.request_id].put_nowait(output)
                await asyncio.sleep(0)
        except Exception as error:  # handed to every waiting request
            for queue in self._queues.values():
                queue.put_nowait(error)

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()
