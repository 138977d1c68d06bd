"""Where a chat model's engine comes from, when it is known what that engine can do, and what its model is called."""

from __future__ import annotations

import dataclasses
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from inferscale_mem import ChatInferScale, InferScaleConfig, InferScaleMemory
from inferscale_mem.config import EngineConfig
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import EngineInfo


def test_with_nothing_given_the_configured_engine_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[InferScaleConfig] = []

    def open_engine(settings: InferScaleConfig, key: bytes) -> FakeEngine:
        asked.append(settings)
        return FakeEngine("Well.")

    monkeypatch.setattr("inferscale_mem.adapters.langchain.source.open_engine", open_engine)
    chat = ChatInferScale(temperature=0.0, max_tokens=8)
    assert asked == [] and chat.profile is None
    assert chat.invoke("Hello").content == "Well." and asked == [InferScaleConfig.from_env()]
    assert chat.profile is not None
    monkeypatch.setenv("INFERSCALE_MODEL", "owner/name")
    assert ChatInferScale(temperature=0.0, max_tokens=8).invoke("Hello").content == "Well."
    assert asked[1].model == "owner/name"


def test_what_is_given_about_a_server_reaches_the_one_that_is_named_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://somewhere:8000/v1"
    given: dict[str, Any] = {"api_key": "k-1", "timeout": 7.0, "max_retries": 0}

    def opened(**more: Any) -> tuple[object, ...]:
        settings = ChatInferScale(**given, **more)._settings
        assert settings is not None
        engine = settings.engine
        return engine.base_url, engine.api_key, engine.timeout, engine.retries

    assert opened(base_url=url) == opened(config={"engine": {"base_url": url}}) == (url, "k-1", 7.0, 0)
    plain = EngineConfig()
    assert opened() == (None, None, plain.timeout, plain.retries), "about a server, and there is none"
    monkeypatch.setenv("INFERSCALE_BASE_URL", url)
    assert opened() == (url, "k-1", 7.0, 0)


def test_a_model_may_be_forgotten_while_another_ones_engine_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the garbage collector closes its engine from within the opening."""
    closed = threading.Event()
    forgotten: list[ChatInferScale] = []

    class Closing(FakeEngine):
        def close(self) -> None:
            super().close()
            closed.set()

    def start(model: Any, config: EngineConfig, key: bytes | None) -> FakeEngine:
        if not forgotten:
            return Closing("First.")
        forgotten.clear()
        gc.collect()
        return FakeEngine("Second.")

    monkeypatch.setattr("inferscale_mem.engines._start", start)
    first = ChatInferScale(base_url="http://somewhere:1/v1")
    assert first.invoke("Hello").content == "First."
    forgotten.append(first)
    del first
    answers: list[Any] = []
    second = ChatInferScale(base_url="http://somewhere:2/v1")
    asking = threading.Thread(target=lambda: answers.append(second.invoke("Hello").content), daemon=True)
    asking.start()
    asking.join(20)
    assert answers == ["Second."] and closed.wait(20) and not forgotten


def test_the_profile_of_a_memory_is_known_from_its_engines_start() -> None:
    engine = FakeEngine()
    with InferScaleMemory(engine=engine) as memory:
        before = ChatInferScale(memory=memory)
        assert before.profile is None and memory.open_service is None
        assert memory.service is memory.open_service
        profile = ChatInferScale(memory=memory).profile
        assert profile is not None and profile["max_input_tokens"] == engine.info.max_model_len - 1
        assert before.invoke("Hello").content and before.profile == profile
    assert memory.open_service is None
    engine.close()


class Named(FakeEngine):
    """Runs a model from a folder, or of a Hugging Face id."""

    model = ""

    @property
    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info, model=self.model)


def test_a_model_in_a_folder_is_called_by_the_folders_name(tmp_path: Path) -> None:
    engine = Named()
    engine.model = str(tmp_path / "my-model")
    chat = ChatInferScale(engine=engine)
    for model in ("my-model", str(tmp_path / "my-model")):
        answer = chat.invoke("Hello", model=model)
        assert answer.response_metadata["model_name"] == chat.model_name == "my-model"
    assert chat.profile is not None and chat.profile["name"] == "my-model"
    engine.model = "owner/name"
    assert chat.model_name == "owner/name"
    engine.close()
