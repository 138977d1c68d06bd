"""Real Mem0, real embedded Qdrant, the real embedder; the engine is the fake one unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.testing import FakeEngine

Open = Callable[..., Any]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine that keeps records and makes up answers."""
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def open_memory(engine: FakeEngine) -> Iterator[Open]:
    """Opens memories on the test's engine and home; whatever the test leaves open is closed behind it."""
    opened: list[Any] = []

    def open_(*args: Any, kind: type = InferScaleMemory, **kwargs: Any) -> Any:
        memory = kind(*args, **{"engine": engine, **kwargs})
        opened.append(memory)
        return memory

    yield open_
    for memory in opened:
        memory.close()


@pytest.fixture
def memory(open_memory: Open) -> InferScaleMemory:
    """A memory with nothing configured, on the fake engine."""
    return open_memory()


@pytest.fixture
def async_memory(open_memory: Open) -> AsyncInferScaleMemory:
    """Its async twin."""
    return open_memory(kind=AsyncInferScaleMemory)
