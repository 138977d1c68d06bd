from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models

from inferscale_mem.config import EngineConfig
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import EngineConformance, ScorerConformance
from inferscale_mem.testing.scene import KEY

pytestmark = pytest.mark.engine


def open_vllm(path: str, **changes: Any) -> Engine:
    from inferscale_mem.engines.vllm_local import VllmEngine

    settings = {"dtype": "float32", "block_size": 32, "record_bytes": 16 << 20, "kv_cache_bytes": 32 << 20}
    return VllmEngine(path, EngineConfig(**{**settings, **changes}), KEY)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Heads of 32 are the smallest that vLLM's CPU backend takes.
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), hidden_size=128)


@pytest.fixture(scope="module", params=["beside", "in_process"])
def engine(path: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = open_vllm(path, multiprocess=request.param == "beside")
    yield engine
    engine.close()


@pytest.fixture
def make_engine(path: str, engine: Engine) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(record_tokens: int | None = None, connector: bool = True) -> Engine:
        budget = {"record_bytes": record_tokens * engine.info.bytes_per_token} if record_tokens else {}
        made.append(open_vllm(path, connector=connector, **budget))
        return made[-1]

    yield make
    for one in made:
        one.close()


class TestVllmEngine(EngineConformance, ScorerConformance):
    exact_tolerance = 1e-3
    batch_tolerance = 1e-4
