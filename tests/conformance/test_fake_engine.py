from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferscale_mem.protocols import Engine
from inferscale_mem.testing import EngineConformance, FakeEngine
from inferscale_mem.testing.scene import KEY


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = FakeEngine(key=KEY)
    yield engine
    engine.close()


@pytest.fixture
def make_engine(engine: Engine) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(record_tokens: int | None = None, connector: bool = True) -> Engine:
        budget = record_tokens * engine.info.bytes_per_token if record_tokens else 1 << 20
        made.append(FakeEngine(key=KEY, record_bytes=budget, connector=connector))
        return made[-1]

    yield make
    for one in made:
        one.close()


class TestFakeEngine(EngineConformance):
    computes = False
