"""vLLM's own server, started with the options that bring memory into it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm.entrypoints.launchers.api_server import entry
from vllm.platforms import current_platform

from inferscale_mem.config import InferScaleConfig
from inferscale_mem.engines.processor import cpu_dtype
from inferscale_mem.engines.vllm_start import CPU_KV_CACHE_BYTES, GUIDED, connector_config, temporary_key_file
from inferscale_mem.handle_key import KEY_FILE, load_key

MIDDLEWARE = "inferscale_mem.server.MemoryMiddleware"


def serve(
    model: str,
    options: Sequence[str],
    config: InferScaleConfig,
    *,
    record_bytes: int,
    record_dtype: str,
    preamble: str | None = None,
    self_test: bool = True,
) -> int:
    """Serve until somebody stops it; returns the exit code.

    Args:
        model: local path or Hugging Face id.
        options: of vLLM's server; they win over ours.
        config: names the handle key.
        record_bytes: budget for records, per rank.
        record_dtype: in which they are stored.
        preamble: file of a trained one.
        self_test: check at start that injection is exact.
    """
    with _key_file(config) as key_file:
        transfer = connector_config(
            record_bytes, record_dtype, preamble, key_file, self_test=self_test, end_with_parent=True
        )
        arguments = ["--model", model, *server_options(model, transfer, options), *options]
        before = sys.argv
        sys.argv = ["inferscale-mem serve", *arguments]
        try:
            entry.main()  # type: ignore[no-untyped-call]
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            sys.argv = before
    return 0


def server_options(model: str, transfer: dict[str, object], given: Sequence[str]) -> list[str]:
    """What ``serve`` adds to vLLM's command line, where ``given`` does not say otherwise."""
    options = {
        "--host": ["127.0.0.1"],
        "--kv-transfer-config": [json.dumps(transfer)],
        "--max-logprobs": ["-1"],
        "--structured-outputs-config": [json.dumps(GUIDED)],
        "--enable-prompt-tokens-details": [],
    }
    if Path(model).is_dir():  # clients on other machines do not know the path
        options["--served-model-name"] = [model, Path(model).name]
    said = {option.partition("=")[0] for option in given}
    if current_platform.is_cpu():
        options |= {"--enforce-eager": [], "--kv-cache-memory-bytes": [str(CPU_KV_CACHE_BYTES)]}
        if "--dtype" not in said:
            options["--dtype"] = [cpu_dtype("auto")]
    added = [word for name, values in options.items() if name not in said for word in (name, *values)]
    return ["--middleware", MIDDLEWARE, *added]


@contextlib.contextmanager
def _key_file(config: InferScaleConfig) -> Iterator[str]:
    """A file with the handle key, for as long as the server runs."""
    key = load_key(config)
    if config.handle_key is None:
        yield str((config.home / KEY_FILE).absolute())
        return
    with temporary_key_file(key) as path:
        assert path is not None
        yield path
