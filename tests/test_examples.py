"""The examples do what they say, on a memory with a fake engine; the long conversation on the real model, too."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.mark.engine
def test_a_long_conversation_on_the_real_model(vllm_engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"handle_key": KEY.hex(), "encoding": {"text_tail": 0}}  # the engine checks handles with its own key
    memory = InferScaleMemory(engine=vllm_engine, inferscale=settings)
    rows = load("long_conversation").main(memory)
    memory.close()
    print(capsys.readouterr().out)
    assert len(rows) == 20 and all(0 < computed <= 2 * new for new, computed in rows)
