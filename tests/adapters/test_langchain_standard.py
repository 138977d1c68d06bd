"""LangChain's own standard unit tests. No engine is started for them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.load import dumpd, load
from langchain_tests.unit_tests import ChatModelUnitTests

from inferscale_mem.adapters.langchain import ChatInferScale


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatInferScale]:
        return ChatInferScale

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "owner/name"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        url = "http://localhost:8000/v1"
        env = {"INFERSCALE_BASE_URL": url, "INFERSCALE_API_KEY": "k-3f9"}
        return env, {"model": "owner/name"}, {"base_url": url, "api_key": "k-3f9"}

    @pytest.mark.xfail(
        raises=ValueError,
        strict=True,
        reason="it lets LangChain's load take what LangChain's own list names, and no class of others is on it; "
        "see test_a_model_made_from_settings_is_written_down",
    )
    def test_serdes(self, model: Any, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


KEY = "0123456789abcdef" * 4
SETTINGS: list[dict[str, Any]] = [
    {"model": "owner/name"},
    {"model": "owner/name", "base_url": "http://localhost:8000/v1", "api_key": "k-3f9", "timeout": 5.0},
    {"config": {"engine": {"kind": "transformers"}}, "temperature": 0.5, "stop": ["x"], "user_id": "alice"},
    {"config": {"handle_key": KEY, "engine": {"base_url": "http://localhost:8000/v1", "api_key": "k-3f9"}}},
]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_model_made_from_settings_is_written_down(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What LangChain's own test does, with the class named."""
    if "k-3f9" in str(settings):
        monkeypatch.setenv("INFERSCALE_API_KEY", "k-3f9")
    if KEY in str(settings):
        monkeypatch.setenv("INFERSCALE_HANDLE_KEY", KEY)
    chat = ChatInferScale(**settings)
    written = dumpd(chat)
    for said in (str(written), repr(chat)):
        assert "k-3f9" not in said and KEY not in said
    again = load(written, allowed_objects=[ChatInferScale], valid_namespaces=["inferscale_mem"], secrets_from_env=True)
    assert again.asdict() == chat.asdict() and again._settings == chat._settings


def test_tools_and_structured_output_are_declared() -> None:
    """So that the tests about them are not skipped."""
    assert TestUnit().has_tool_calling and TestUnit().has_structured_output and TestUnit().has_tool_choice


@pytest.mark.parametrize("setting", ["engine", "memory", "service"])
def test_what_is_no_source_is_refused_with_a_clear_error(setting: str) -> None:
    from inferscale_mem.errors import ConfigError

    with pytest.raises(ConfigError, match=f"{setting}=5"):
        ChatInferScale(**{setting: 5})
