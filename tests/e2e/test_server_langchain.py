"""LangChain's integration tests, all of them, against a live server: nothing but its URL, its key and its model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_suite import ChatModelSuite
from live_server import LiveServer

from inferscale_mem.testing.scene import KEY


@pytest.mark.engine
class TestOnServer(ChatModelSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: LiveServer, smollm2_path: str) -> None:
        self.source = {"base_url": server.base_url, "model": smollm2_path, "config": {"handle_key": KEY.hex()}}

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.source, **self.sampling}
