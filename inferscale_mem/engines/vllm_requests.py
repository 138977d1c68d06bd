"""Our requests in vLLM's words: sampling parameters, outputs, and what an engine is."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from inferscale_mem import wire
from inferscale_mem.config import AUTO
from inferscale_mem.engines.over_requests import Output
from inferscale_mem.engines.vllm_schema import guided
from inferscale_mem.errors import InputError
from inferscale_mem.types import Chunk, EngineInfo, Sampling, Segment

SAMPLING_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Settings that vLLM knows by the same name."""


def sampling_params(
    sampling: Sampling, kv_transfer_params: Mapping[str, Any], room: int, defaults: Mapping[str, Any]
) -> SamplingParams:
    """vLLM's parameters.

    Args:
        sampling: ours.
        kv_transfer_params: go with the request.
        room: the longest answer possible.
        defaults: of the model's generation config.

    Raises:
        InputError: vLLM cannot sample like that.
    """
    given = {name: value for name in SAMPLING_NAMES if (value := getattr(sampling, name)) is not None}
    schema = None if sampling.json_schema is None else guided(sampling.json_schema, sampling.max_tokens)
    try:
        return SamplingParams(
            **{"max_tokens": room, **defaults, **given},
            n=sampling.n,
            stop=list(sampling.stop) or None,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            skip_special_tokens=sampling.skip_special_tokens,
            detokenize=sampling.detokenize,
            flat_logprobs=sampling.logprobs == -1,
            structured_outputs=StructuredOutputsParams(json=schema) if schema is not None else None,
            extra_args={"kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params else None,
            output_kind=RequestOutputKind.DELTA,
        )
    except VLLMValidationError as error:
        raise InputError(f"vLLM cannot do this request: {error}") from error


async def read_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Output, None]:
    """vLLM's outputs as ours. Closing it aborts the request.

    Raises:
        InputError: vLLM cannot do this request.
    """
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                answer = wire.read_answer(output.kv_transfer_params)
                yield Output(tuple(map(_chunk, output.outputs)), answer, output.num_cached_tokens)
    except VLLMValidationError as error:
        raise InputError(f"vLLM cannot do this request: {error}") from error


def _chunk(piece: Any) -> Chunk:
    logprobs = None
    if piece.logprobs is not None:
        logprobs = tuple(_flat(piece.logprobs) if isinstance(piece.logprobs, FlatLogprobs) else _nested(piece.logprobs))
    return Chunk(piece.index, piece.text, tuple(piece.token_ids), logprobs, piece.finish_reason)


def _nested(positions: Iterable[Any]) -> Iterator[dict[int, float]]:
    for position in positions:
        yield {token: entry.logprob for token, entry in position.items()}


def _flat(logprobs: FlatLogprobs) -> Iterator[dict[int, float]]:
    """The form that makes no object per token of the vocabulary."""
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        yield dict(zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True))


def engine_info(model: str, vllm_config: VllmConfig, status: Mapping[str, Any] | None) -> EngineInfo:
    """What a running vLLM is.

    Args:
        model: its name or folder.
        vllm_config: how it was started.
        status: the connector's; None if there is none.
    """
    model_config = vllm_config.model_config
    dtype = str(model_config.dtype).removeprefix("torch.")
    identity = {
        "engine": "vllm",
        "dtype": dtype,
        "config": model_config.hf_config.to_dict(),
        "weights": _weights_identity(model),
        "max_model_len": model_config.max_model_len,
    }
    record_dtype = status["record_dtype"] if status else AUTO
    if record_dtype != AUTO:
        identity["records"] = record_dtype
    preamble = status["preamble"] if status else None
    if preamble is not None:
        identity["preamble"] = preamble
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
        record_dtype=record_dtype,
        preamble=Segment("header", tuple(preamble[1]), preamble[0]) if preamble else None,
    )


def _weights_identity(model: str) -> list[Any]:
    folder = Path(model)
    return [model] if not folder.is_dir() else sorted([f.name, f.stat().st_size] for f in folder.glob("*.safetensors"))
