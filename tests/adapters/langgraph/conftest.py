"""A real memory (Mem0, embedded Qdrant, MiniLM) over a fake engine that always gives the same answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferscale_mem import InferScaleMemory
from inferscale_mem.testing import FakeEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine("Peanuts.")
    yield engine
    engine.close()


@pytest.fixture
def memory(engine: FakeEngine) -> Iterator[InferScaleMemory]:
    made = InferScaleMemory(engine=engine)
    yield made
    made.close()
