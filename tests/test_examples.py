"""The examples do what they say, on a memory with a fake engine; the long conversation on the real model, too."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import openai
import pytest

import inferscale_mem
from inferscale_mem import InferScaleMemory
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import FakeEngine
from inferscale_mem.testing.scene import KEY

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine("Well.", max_model_len=1 << 16)
    yield engine
    engine.close()


@pytest.fixture
def memory(engine: FakeEngine) -> Iterator[InferScaleMemory]:
    memory = InferScaleMemory(engine=engine)
    yield memory
    memory.close()


@pytest.mark.parametrize(
    ("name", "recalled"),
    [
        ("langchain_chain", "My dog is called Rex."),
        ("langchain_agent", "My dog is called Rex."),
        ("langgraph_store", "My dog is called Rex."),
        ("langchain_retriever", "I drink tea without milk."),
    ],
)
def test_memories_reach_the_model(memory: InferScaleMemory, engine: FakeEngine, name: str, recalled: str) -> None:
    load(name).main(memory)
    plan, _ = engine.requests[-1]
    assert f"- {recalled}" in engine.tokenizer.decode(plan.token_ids).replace("content: ", "")
    assert any(segment.record for segment in plan.facts)


def test_nobody_is_told_what_is_anothers(memory: InferScaleMemory, engine: FakeEngine) -> None:
    load("langchain_agent").main(memory)
    prompts = [engine.tokenizer.decode(plan.token_ids) for plan, _ in engine.requests]
    assert "Tom" in prompts[1] and "Rex" not in prompts[1] and "Tom" not in prompts[2]


def test_a_long_conversation_costs_what_is_new(memory: InferScaleMemory) -> None:
    rows = load("long_conversation").main(memory)
    assert len(rows) == 20 and all(0 < computed <= 2 * new for new, computed in rows)


def test_the_openai_loop_goes_on_where_a_search_finds_nothing(
    memory: InferScaleMemory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's report is there only if the request held handles."""

    def served(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"object": "list", "data": [{"id": "m", "object": "model"}]})
        report = {"inferscale": {"facts_injected": 1}} if b"ism1." in request.content else {}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Well."}}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        return httpx.Response(
            200, json={"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage} | report
        )

    transport = httpx.Client(transport=httpx.MockTransport(served))
    monkeypatch.setattr(openai, "OpenAI", functools.partial(openai.OpenAI, http_client=transport))
    monkeypatch.setattr(inferscale_mem, "InferScaleMemory", lambda **settings: memory)
    loop = load("openai_loop")
    assert loop.chat_with_memories("What is my dog called?") == "Well."
    assert "no memories in the request" in capsys.readouterr().out
    memory.add("My dog is called Rex.", user_id="default_user", infer=False)
    assert loop.chat_with_memories("What is my dog called?") == "Well."
    assert "'facts_injected': 1" in capsys.readouterr().out


@pytest.mark.engine
def test_a_long_conversation_on_the_real_model(vllm_engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"handle_key": KEY.hex(), "encoding": {"text_tail": 0}}  # the engine checks handles with its own key
    memory = InferScaleMemory(engine=vllm_engine, inferscale=settings)
    rows = load("long_conversation").main(memory)
    memory.close()
    print(capsys.readouterr().out)
    assert len(rows) == 20 and all(0 < computed <= 2 * new for new, computed in rows)
