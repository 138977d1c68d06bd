"""Starting vLLM with the connector: its arguments, its errors as ours, and what its child processes must not see."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from vllm import AsyncEngineArgs
from vllm import __version__ as vllm_version
from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from inferscale_mem.config import EngineConfig, vllm_multiprocessing
from inferscale_mem.engines.processor import cpu_dtype
from inferscale_mem.engines.serve_options import CONNECTOR
from inferscale_mem.engines.vllm_backends import Backend, BesideBackend, InProcessBackend
from inferscale_mem.errors import EngineError, ModelError, UnsupportedModelError
from inferscale_mem.kv.connector.layers import unsupported_config
from inferscale_mem.kv.preamble import Preamble
from inferscale_mem.models.loading import LOADING

CPU_KV_CACHE_BYTES = 1 << 30
GUIDED = {"backend": "guidance", "disable_any_whitespace": True}
"""Without room for whitespace a weak model cannot fill its answer with it."""

logger = logging.getLogger(__name__)


def start_vllm(model: str, config: EngineConfig, key: bytes | None) -> tuple[Backend, VllmConfig]:
    """A running vLLM, and what it was configured to.

    Raises:
        ModelError: the model cannot be found or read.
        UnsupportedModelError: its configuration already shows that its KV cannot be stored and moved.
        ConfigError: the preamble was trained for another model.
        EngineError: vLLM does not start.
    """
    with temporary_key_file(key) as key_file, _children_without_main(), _without_llvmlite():
        # On a CPU the worker stays in the core's process: between two processes vLLM waits by spinning, and on few
        # cores that takes the worker's own cores from it.
        with vllm_multiprocessing(config.multiprocess and not current_platform.is_cpu()):
            vllm_config = _vllm_config(model, _engine_args(model, config, key_file))
        if config.connector and (reasons := unsupported_config(vllm_config)):
            raise UnsupportedModelError(model, reasons)
        if config.connector and config.preamble is not None:
            # What the core's worker finds wrong, which looks at heads, too, is only to be read in its log.
            layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
            if (preamble := Preamble.open(config.preamble)).layers != layers:
                raise preamble.other_model()
        with vllm_multiprocessing(config.multiprocess):
            return _start_backend(config, vllm_config), vllm_config


def _start_backend(config: EngineConfig, vllm_config: VllmConfig) -> Backend:
    logger.info("Starting vLLM %s", vllm_version)
    try:
        if config.multiprocess:
            return BesideBackend(vllm_config)
        with LOADING:
            return InProcessBackend(vllm_config)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"vLLM {vllm_version} does not start: {error}. Its own log above names the cause; "
            "`inferscale-mem doctor` checks the installation."
        ) from error


def _engine_args(model: str, config: EngineConfig, key_file: str | None) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    given: dict[str, Any] = {
        "model": model,
        "dtype": cpu_dtype(config.dtype) if on_cpu else config.dtype,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "max_num_batched_tokens": config.max_batched_tokens,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        "max_logprobs": -1,
        "structured_outputs_config": GUIDED,
        "disable_log_stats": True,
    }
    if config.connector:
        given["kv_transfer_config"] = KVTransferConfig(
            **connector_config(
                config.record_bytes,
                config.record_dtype,
                config.preamble,
                key_file,
                end_with_parent=config.multiprocess,
            )
        )
    given.update(config.extra)
    return AsyncEngineArgs(**{name: value for name, value in given.items() if value is not None})


def connector_config(
    record_bytes: int, record_dtype: str, preamble: str | None, key_file: str | None, **more: Any
) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` with our connector; ``more`` are further settings of the connector.

    Raises:
        ConfigError: the preamble is no such file.
    """
    if preamble is not None:
        preamble = Preamble.open(preamble).path  # the core, which opens it again, could not tell what is wrong
    keys = {"handle_key_file": key_file, "unsigned_orders": key_file is None}
    settings = {"record_bytes": record_bytes, "record_dtype": record_dtype, "preamble": preamble, **keys}
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "inferscale_mem.kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**settings, "on_unsupported": "report", **more},
    }


def _vllm_config(model: str, args: AsyncEngineArgs) -> VllmConfig:
    try:
        return args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"vLLM {vllm_version} cannot use the model {model!r}: {error}. Give a Hugging Face id that can be reached, "
            "or a local folder with config.json, weights and tokenizer."
        ) from error


@contextlib.contextmanager
def temporary_key_file(key: bytes | None) -> Iterator[str | None]:
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


@contextlib.contextmanager
def _without_llvmlite() -> Iterator[None]:
    """A worker that starts looks at the attributes of all modules, and stumbles over one of llvmlite's (numba's), which
    answers to any name. Seen in vLLM 0.32, ``triton_utils/dispatcher.py``."""
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module
