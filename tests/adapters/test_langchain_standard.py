"""LangChain's own standard tests, without tools and structured output, which are not claimed yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.testing import FakeEngine


@pytest.fixture(scope="module", autouse=True)
def fake_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    engine = FakeEngine("Hello.")
    TestUnit.engine = engine
    yield
    engine.close()


class TestUnit(ChatModelUnitTests):
    """Needs an engine before fixtures of tests can give one."""

    engine: Any = None

    @property
    def chat_model_class(self) -> type[ChatInferScale]:
        return ChatInferScale

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False
