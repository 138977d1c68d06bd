from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import EngineConformance, ScorerConformance
from inferscale_mem.testing.scene import KEY


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(path: str) -> Iterator[Engine]:
    engine = TransformersEngine(path, settings(), KEY)
    yield engine
    engine.close()


@pytest.fixture
def make_engine(path: str, engine: Engine) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(record_tokens: int | None = None, connector: bool = True) -> Engine:
        budget = {"record_bytes": record_tokens * engine.info.bytes_per_token} if record_tokens else {}
        made.append(TransformersEngine(path, settings(connector=connector, **budget), KEY))
        return made[-1]

    yield make
    for one in made:
        one.close()


def settings(**changes: Any) -> EngineConfig:
    given = {"kind": "transformers", "dtype": "float32", "record_bytes": 64 << 20, "max_model_len": 512}
    return EngineConfig(**{**given, **changes})


class TestTransformersEngine(EngineConformance, ScorerConformance):
    exact_tolerance = 1e-4
    batch_tolerance = 1e-5
