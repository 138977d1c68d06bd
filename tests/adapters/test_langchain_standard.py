"""LangChain's own standard unit tests. No engine is started for them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from inferscale_mem.adapters.langchain import ChatInferScale


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatInferScale]:
        return ChatInferScale

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "owner/name"}


def test_tools_and_structured_output_are_declared() -> None:
    """So that the tests about them are not skipped."""
    assert TestUnit().has_tool_calling and TestUnit().has_structured_output and TestUnit().has_tool_choice


@pytest.mark.parametrize("setting", ["engine", "memory", "service"])
def test_what_is_no_source_is_refused_with_a_clear_error(setting: str) -> None:
    from inferscale_mem.errors import ConfigError

    with pytest.raises(ConfigError, match=f"{setting}=5"):
        ChatInferScale(**{setting: 5})
