"""LangChain's integration tests, all of them, on engines in this process."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.protocols import Engine


@pytest.mark.engine
class TestOnVllm(ChatModelIntegrationTests):
    """On the packaged model of 135M parameters, greedy."""

    @pytest.fixture(autouse=True)
    def _engine(self, vllm_engine: Engine) -> None:
        self.engine = vllm_engine

    @property
    def chat_model_class(self) -> type[ChatInferScale]:
        return ChatInferScale

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "temperature": 0.0, "max_tokens": 96}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason="135M parameters: told in words which keys the JSON should have, it writes others")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="135M parameters: left to choose, it does not call the tool")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
