"""The engine on vLLM, in this process or beside it, with the connector loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from inferscale_mem import wire
from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.base import EngineBase
from inferscale_mem.engines.requests import check_encode, check_generate
from inferscale_mem.engines.self_test import run_self_test
from inferscale_mem.engines.vllm_start import start_vllm
from inferscale_mem.errors import EngineClosedError, EngineError, InputError, UnsupportedModelError
from inferscale_mem.tokenizer import HFChatTokenizer
from inferscale_mem.types import (
    Chunk,
    EncodePlan,
    EncodeReport,
    EngineInfo,
    EngineStatus,
    PromptPlan,
    Sampling,
)

ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)
SAMPLING_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Settings that vLLM knows by the same name."""


class VllmEngine(EngineBase):
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
        self._model, self._config, self._key = model, config, key
        try:
            self._submit(self._start()).result()
        except BaseException:
            self._closed = True
            with contextlib.suppress(AttributeError):
                self._backend.shutdown()
            self._runner.close()
            raise

    async def _start(self) -> None:
        self._backend, vllm_config = start_vllm(self._model, self._config, self._key)
        self._tokenizer = HFChatTokenizer(self._backend.tokenizer)
        self._defaults = vllm_config.model_config.get_diff_sampling_param()
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        status = await self._ask(wire.status_params()) if self._config.connector else None
        if status is not None and status["unsupported"]:
            raise UnsupportedModelError(self._model, status["unsupported"])
        self._info = _engine_info(self._model, vllm_config, status)
        if status is not None and self._config.self_test:
            await run_self_test(self._info, self._vocab_size, self._ask, self._logprobs)

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
        answer = await self._request(plan.token_ids, ONE_TOKEN, wire.encode_params(plan))
        return wire.encode_report(plan, answer)

    async def _generate(self, plan: PromptPlan, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        room = check_generate(plan, sampling, self._info.max_model_len, self._vocab_size)
        params = wire.inject_params(plan) if any(segment.record for segment in plan.segments) else {}
        started, ttft_ms, answer, waiting = time.perf_counter(), None, None, sampling.n
        async for output in self._run(plan.token_ids, sampling, params, room):
            if ttft_ms is None:
                ttft_ms = 1000 * (time.perf_counter() - started)
            answer = wire.read_answer(output.kv_transfer_params) or answer
            for index, piece in enumerate(output.outputs):
                waiting -= piece.finish_reason is not None
                last = waiting == 0 and index == len(output.outputs) - 1
                report = wire.inject_report(plan, answer, ttft_ms) if last else None
                yield _chunk(piece, report)

    async def _drop(self, handles: Sequence[str]) -> None:
        if handles and self._config.connector:
            await self._ask(wire.drop_params(handles))

    async def _status(self) -> EngineStatus:
        if not self._config.connector:
            return EngineStatus(0, 0, 0, {})
        answer = await self._ask(wire.status_params())
        return EngineStatus(answer["records"], answer["tokens"], answer["bytes"], answer["counters"])

    async def _close(self) -> None:
        self._backend.shutdown()

    # Requests.

    async def _ask(self, params: dict[str, Any], tokens: Sequence[int] = (0,)) -> Any:
        """Answer of the connector to a request that is only there to carry an order."""
        answer = await self._request(list(tokens), ONE_TOKEN, params)
        if answer is None:
            raise EngineError(
                f"{wire.NO_CONNECTOR}, although it was configured; is vLLM {vllm_version} the tested version?"
            )
        if "error" in answer:
            raise EngineError(f"the memory connector refused an order: {answer['error']}")
        return answer

    async def _request(self, tokens: list[int], sampling: Sampling, params: dict[str, Any]) -> Any:
        answer = None
        async for output in self._run(tokens, sampling, params):
            answer = wire.read_answer(output.kv_transfer_params) or answer
        return answer

    async def _logprobs(self, tokens: list[int], params: dict[str, Any], top: int) -> tuple[dict[int, float], Any]:
        """First-token log-probs of a prompt, and the connector's answer."""
        sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=top)
        answer, found = None, {}
        async for output in self._run(tokens, sampling, params):
            answer = wire.read_answer(output.kv_transfer_params) or answer
            for piece in output.outputs:
                if piece.logprobs:
                    found = {token: entry.logprob for token, entry in piece.logprobs[0].items()}
        return found, answer

    async def _run(
        self, tokens: list[int], sampling: Sampling, params: dict[str, Any], room: int = 1
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, vLLM's errors turned into ours. Closing the generator aborts the request."""
        try:
            signed = wire.sign(params, tokens, self._key)
            outputs = self._backend.generate(tokens, self._sampling_params(sampling, signed, room))
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except VLLMValidationError as error:
            raise InputError(f"vLLM cannot do this request: {error}") from error
        except EngineDeadError as error:
            if self._closed:
                raise EngineClosedError("The engine was closed while it answered; open a new one.") from error
            self.dead = True
            raise EngineError("vLLM's engine died; its log names the cause. Close this one, open another.") from error

    def _sampling_params(self, sampling: Sampling, kv_transfer_params: dict[str, Any], room: int) -> SamplingParams:
        """vLLM's parameters; ``room`` is the longest answer possible."""
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(sampling, name)) is not None}
        schema = sampling.json_schema
        return SamplingParams(
            **{"max_tokens": room, **self._defaults, **given},
            n=sampling.n,
            stop=list(sampling.stop) or None,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            structured_outputs=StructuredOutputsParams(json=dict(schema)) if schema is not None else None,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
            output_kind=RequestOutputKind.DELTA,
        )


def _engine_info(model: str, vllm_config: VllmConfig, status: Any) -> EngineInfo:
    model_config = vllm_config.model_config
    dtype = str(model_config.dtype).removeprefix("torch.")
    identity = {
        "engine": "vllm",
        "dtype": dtype,
        "config": model_config.hf_config.to_dict(),
        "weights": _weights_identity(model),
        "max_model_len": model_config.max_model_len,
    }
    return EngineInfo(
        model=model,
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16],
        max_model_len=model_config.max_model_len,
        block_size=vllm_config.cache_config.block_size,
        dtype=dtype,
        bytes_per_token=status["bytes_per_token"] if status else 0,
        record_bytes=status["capacity"] if status else 0,
        connector=status is not None,
        verifies_handles=bool(status and status["verifies_handles"]),
        version=f"vllm {vllm_version}",
        device=current_platform.get_device_name() or current_platform.device_type,
    )


def _weights_identity(model: str) -> list[Any]:
    folder = Path(model)
    return [model] if not folder.is_dir() else sorted([f.name, f.stat().st_size] for f in folder.glob("*.safetensors"))


def _chunk(piece: Any, report: Any) -> Chunk:
    logprobs = None
    if piece.logprobs is not None:
        logprobs = tuple({token: entry.logprob for token, entry in position.items()} for position in piece.logprobs)
    return Chunk(piece.index, piece.text, tuple(piece.token_ids), logprobs, piece.finish_reason, report)
