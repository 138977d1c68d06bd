"""The conformance suite over HTTP, against live servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import tiny_models
from live_server import SMALL, LiveServer, live_server

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.vllm_server import VllmServerEngine
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import EngineConformance, ScorerConformance
from inferscale_mem.testing.scene import KEY

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), hidden_size=128)


@pytest.fixture(scope="module")
def server(path: str) -> Iterator[LiveServer]:
    with live_server(path, "--dtype", "float32", "--record-bytes", str(16 << 20), *SMALL) as server:
        yield server


def open_client(path: str, server: LiveServer, **changes: object) -> Engine:
    return VllmServerEngine(path, EngineConfig(base_url=server.base_url, **changes), KEY)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(path: str, server: LiveServer) -> Iterator[Engine]:
    engine = open_client(path, server)
    yield engine
    engine.close()


@pytest.fixture
def make_engine(path: str, server: LiveServer, engine: Engine) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:

        def make(record_tokens: int | None = None, connector: bool = True) -> Engine:
            where = server
            if record_tokens:
                budget = ("--record-bytes", str(record_tokens * engine.info.bytes_per_token))
                where = stack.enter_context(live_server(path, "--dtype", "float32", *budget, *SMALL))
            made = open_client(path, where, connector=connector)
            stack.callback(made.close)
            return made

        yield make


class TestVllmServerEngine(EngineConformance, ScorerConformance):
    exact_tolerance = 1e-3
    batch_tolerance = 1e-4
    given_up_s = 10.0
