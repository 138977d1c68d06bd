"""The engine on vLLM, in this process or beside it, with the connector loaded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from inferscale_mem import wire
from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.over_requests import Output, RequestEngine, Requests
from inferscale_mem.engines.self_test import run_self_test
from inferscale_mem.engines.vllm_requests import engine_info, read_outputs, sampling_params
from inferscale_mem.engines.vllm_start import start_vllm
from inferscale_mem.errors import EngineClosedError, EngineError, UnsupportedModelError
from inferscale_mem.kv.preamble import Preamble
from inferscale_mem.tokenizer import HFChatTokenizer
from inferscale_mem.types import Sampling


class VllmEngine(RequestEngine):
    """``protocols.Engine`` on vLLM.

    Args:
        model: local path or Hugging Face id.
        config: how to run it.
        key: signs handles and orders; the connector checks both. None: neither is checked by the engine.

    Raises:
        ModelError: the model cannot be found or read.
        UnsupportedModelError: its KV cannot be stored and moved; every reason is listed.
        SelfTestError: injected answers differ from plain ones.
        EngineError: vLLM does not start.
    """

    def __init__(self, model: str, config: EngineConfig, key: bytes | None = None) -> None:
        super().__init__("inferscale-vllm")
        self._requests = Requests(self._run, key)
        try:
            self._submit(self._start(model, config, key)).result()
        except BaseException:
            self._closed = True
            with contextlib.suppress(AttributeError):
                self._backend.shutdown()
            self._runner.close()
            raise

    async def _start(self, model: str, config: EngineConfig, key: bytes | None) -> None:
        self._backend, vllm_config = start_vllm(model, config, key)
        self._tokenizer = HFChatTokenizer(self._backend.tokenizer)
        if config.preamble and config.connector:
            Preamble.open(config.preamble).check(self._tokenizer.digest)
        self._defaults = vllm_config.model_config.get_diff_sampling_param()
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        status = await self._requests.ask(wire.status_params()) if config.connector else None
        if status is not None and status["unsupported"]:
            raise UnsupportedModelError(model, status["unsupported"])
        self._info = engine_info(model, vllm_config, status)
        if status is not None and config.self_test:
            await run_self_test(self._info, self._vocab_size, self._requests.ask, self._requests.logprobs)

    async def _run(
        self, tokens: list[int], sampling: Sampling, params: dict[str, Any], room: int
    ) -> AsyncGenerator[Output, None]:
        """Outputs of one request, vLLM's errors turned into ours. Closing the generator aborts the request."""
        try:
            made = sampling_params(sampling, params, room, self._defaults)
            async with contextlib.aclosing(read_outputs(self._backend.generate(tokens, made))) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            if self._closed:
                raise EngineClosedError("The engine was closed while it answered; open a new one.") from error
            self.dead = True
            raise EngineError("vLLM's engine died; its log names the cause. Close this one, open another.") from error

    async def _close(self) -> None:
        self._backend.shutdown()
