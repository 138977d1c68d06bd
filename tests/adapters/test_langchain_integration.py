"""LangChain's integration tests, all of them, on an engine beside this process."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_suite import ChatModelSuite

from inferscale_mem.protocols import Engine


@pytest.mark.engine
class TestOnVllm(ChatModelSuite):
    @pytest.fixture(autouse=True)
    def _engine(self, vllm_engine: Engine) -> None:
        self.engine = vllm_engine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, **self.sampling}
