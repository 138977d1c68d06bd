"""Servers that are started with vLLM's own options, and servers that must not come up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import tiny_models
from live_server import SMALL, START_SECONDS, LiveServer, free_port, live_server

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.vllm_server import VllmServerEngine
from inferscale_mem.errors import ConfigError
from inferscale_mem.testing.scene import KEY, Scene

pytestmark = pytest.mark.engine

PLAIN = ("-m", "vllm.entrypoints.openai.api_server")
MIDDLEWARE = ("--middleware", "inferscale_mem.server.MemoryMiddleware")
API_KEY = "secret"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), hidden_size=128)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """As docs/server.md has them, without our command."""
    key = tmp_path_factory.mktemp("key") / "handle.key"
    key.write_text(KEY.hex())
    transfer = {
        "kv_connector": "InferScaleConnector",
        "kv_connector_module_path": "inferscale_mem.kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"handle_key_file": str(key), "record_bytes": 16 << 20},
    }
    return (*MIDDLEWARE, "--kv-transfer-config", json.dumps(transfer), "--enforce-eager")


@pytest.fixture(scope="module")
def server(path: str, options: tuple[str, ...]) -> Iterator[LiveServer]:
    command = (*PLAIN, "--model", path)
    with live_server(None, *options, "--dtype", "float32", "--api-key", API_KEY, *SMALL, command=command) as server:
        yield server


def test_plain_options_make_the_same_server(path: str, server: LiveServer) -> None:
    engine = VllmServerEngine(path, EngineConfig(base_url=server.base_url, api_key=API_KEY), KEY)
    try:
        scene = Scene(engine)
        memories = scene.memories(3)
        scene.encode_all(memories)
        assert scene.ask(scene.plan(memories)).report.facts_injected == 3
    finally:
        engine.close()


def test_who_has_no_api_key_gets_nowhere(path: str, server: LiveServer) -> None:
    with pytest.raises(ConfigError, match="API key"):
        VllmServerEngine(path, EngineConfig(base_url=server.base_url, api_key="other"), KEY)
    for route in ("info", "requests", "facts"):
        url = server.base_url.removesuffix("/v1") + f"/inferscale/v1/{route}"
        assert httpx.request("GET" if route == "info" else "POST", url, content=b"{}", timeout=60).status_code == 401
    body = {"model": path, "messages": [{"role": "system", "content": "ism1.0123456789abcdef.0123456789abcdef"}]}
    answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 401 and "x-inferscale-facts-requested" not in answer.headers


def start(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a server that ends by itself."""
    done = subprocess.run(
        [sys.executable, *arguments, "--port", str(free_port()), "--dtype", "float32", *SMALL],
        env={**os.environ, "INFERSCALE_HANDLE_KEY": KEY.hex()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_middleware_without_its_connector_does_not_come_up(path: str) -> None:
    code, said = start(*PLAIN, "--model", path, *MIDDLEWARE, "--enforce-eager")
    assert code != 0 and "needs the memory connector" in said


def test_a_cache_that_cannot_be_used_does_not_come_up(path: str, options: tuple[str, ...]) -> None:
    """Our own command refuses it before vLLM is loaded; here the connector does."""
    code, said = start(*PLAIN, "--model", path, *options, "--kv-cache-dtype", "fp8")
    assert code != 0 and "kv_cache_dtype=fp8" in said


def test_the_key_is_not_in_the_log(server: LiveServer) -> None:
    assert KEY.hex() not in server.log.read_text(errors="replace")
