"""The engine on vLLM, in this process or beside it, with the connector loaded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from vllm import AsyncEngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm import __version__ as vllm_version
from vllm.config import KVTransferConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from inferscale_mem import wire
from inferscale_mem.config import EngineConfig, vllm_multiprocessing
from inferscale_mem.engines.base import EngineBase
from inferscale_mem.engines.requests import check_encode, check_generate
from inferscale_mem.engines.self_test import run_self_test
from inferscale_mem.errors import EngineClosedError, EngineError, InputError, ModelError, UnsupportedModelError
from inferscale_mem.kv.connector.layers import unsupported_config
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

logger = logging.getLogger(__name__)

NO_CONNECTOR = "the engine runs without the memory connector"
CPU_KV_CACHE_BYTES = 1 << 30
ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)
SAMPLING_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Settings that vLLM knows by the same name."""


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


class VllmEngine(EngineBase):
    """``protocols.Engine`` on vLLM.

    Args:
        model: local path or Hugging Face id.
        config: how to run it.
        key: signs handles; the connector checks tags with it. None: tags are not checked by the engine.

    Raises:
        ModelError: the model cannot be found or read.
        UnsupportedModelError: its KV cannot be stored and moved; every reason is listed.
        SelfTestError: injected answers differ from plain ones.
        EngineError: vLLM does not start.
    """

    def __init__(self, model: str, config: EngineConfig, key: bytes | None = None) -> None:
        super().__init__("inferscale-vllm")
        self._model, self._config = model, config
        try:
            self._submit(self._start(key)).result()
        except BaseException:
            self._closed = True
            with contextlib.suppress(AttributeError):
                self._backend.shutdown()
            self._runner.close()
            raise

    async def _start(self, key: bytes | None) -> None:
        with _key_file(key) as key_file, _children_without_main(), vllm_multiprocessing(self._config.multiprocess):
            args = _engine_args(self._model, self._config, key_file)
            vllm_config = _vllm_config(self._model, args)
            if self._config.connector and (reasons := unsupported_config(vllm_config)):
                raise UnsupportedModelError(self._model, reasons)
            self._backend = _start_backend(self._config, vllm_config)
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
        return wire.encode_report(plan, answer, NO_CONNECTOR)

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
                report = wire.inject_report(plan, answer, ttft_ms, NO_CONNECTOR) if last else None
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
            raise EngineError(f"{NO_CONNECTOR}, although it was configured; is vLLM {vllm_version} the tested version?")
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
            outputs = self._backend.generate(tokens, self._sampling_params(sampling, params, room))
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except VLLMValidationError as error:
            raise InputError(f"vLLM cannot do this request: {error}") from error
        except EngineDeadError as error:
            if self._closed:
                raise EngineClosedError("The engine was closed while it answered; open a new one.") from error
            raise EngineError("vLLM's engine died; its log names the cause. Close this one, open another.") from error

    def _sampling_params(self, sampling: Sampling, kv_transfer_params: dict[str, Any], room: int) -> SamplingParams:
        """vLLM's parameters; ``room`` is the longest answer possible."""
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(sampling, name)) is not None}
        schema = sampling.json_schema
        # Without room for whitespace a weak model cannot fill its answer with it.
        compact = StructuredOutputsParams(json=dict(schema), disable_any_whitespace=True) if schema else None
        return SamplingParams(
            **{"max_tokens": room, **self._defaults, **given},
            n=sampling.n,
            stop=list(sampling.stop) or None,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            structured_outputs=compact,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
            output_kind=RequestOutputKind.DELTA,
        )


class _BesideBackend:
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
        self._llm.shutdown()


class _InProcessBackend:
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


def _start_backend(config: EngineConfig, vllm_config: VllmConfig) -> Backend:
    try:
        return _BesideBackend(vllm_config) if config.multiprocess else _InProcessBackend(vllm_config)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"vLLM {vllm_version} does not start: {error}. Its own log above names the cause; "
            "`inferscale-mem doctor` checks the installation."
        ) from error


def _engine_args(model: str, config: EngineConfig, key_file: str | None) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    given: dict[str, Any] = {
        "model": model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "max_num_batched_tokens": config.max_batched_tokens,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        "max_logprobs": -1,
        "disable_log_stats": True,
    }
    if config.connector:
        given["kv_transfer_config"] = KVTransferConfig(
            kv_connector="InferScaleConnector",
            kv_connector_module_path="inferscale_mem.kv.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "record_bytes": config.record_bytes,
                "handle_key_file": key_file,
                "on_unsupported": "report",
            },
        )
    given.update(config.extra)
    return AsyncEngineArgs(**{name: value for name, value in given.items() if value is not None})


def _vllm_config(model: str, args: AsyncEngineArgs) -> VllmConfig:
    try:
        return args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"vLLM {vllm_version} cannot use the model {model!r}: {error}. Give a Hugging Face id that can be reached, "
            "or a local folder with config.json, weights and tokenizer."
        ) from error


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
    )


def _weights_identity(model: str) -> list[Any]:
    folder = Path(model)
    return [model] if not folder.is_dir() else sorted([f.name, f.stat().st_size] for f in folder.glob("*.safetensors"))


def _chunk(piece: Any, report: Any) -> Chunk:
    logprobs = None
    if piece.logprobs is not None:
        logprobs = tuple({token: entry.logprob for token, entry in position.items()} for position in piece.logprobs)
    return Chunk(piece.index, piece.text, tuple(piece.token_ids), logprobs, piece.finish_reason, report)


@contextlib.contextmanager
def _key_file(key: bytes | None) -> Iterator[str | None]:
    """The key, where only this user's processes can read it, for as long as the engine starts.

    Not as a setting: vLLM prints those. Not in the environment: every later child process would inherit it.
    """
    if key is None:
        yield None
        return
    descriptor, path = tempfile.mkstemp(prefix="inferscale-", suffix=".key")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(key.hex())
        yield path
    finally:
        os.unlink(path)


@contextlib.contextmanager
def _children_without_main() -> Iterator[None]:
    """Spawned children do not need the program's main module, and importing it again would start a second engine in
    programs without an ``if __name__ == "__main__"`` guard, as most Mem0 programs are."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {n: main.__dict__.pop(n) for n in ("__file__", "__spec__") if n in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
