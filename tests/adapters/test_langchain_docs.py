"""The pages on LangChain and LangGraph are true: their code runs as it stands, on an engine that gives what it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.prompts import ChatPromptTemplate
from page_code import blocks, run_block
from pydantic import BaseModel

from inferscale_mem import ChatInferScale
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import PromptPlan, Sampling

PAGES = ("langchain.md", "langgraph.md")
SAMPLES = {"string": "Rex", "integer": 3}


def answer(plan: PromptPlan, sampling: Sampling) -> str:
    """JSON of the schema that is asked for, or a few words."""
    if sampling.json_schema is None:
        return "Rex."
    wanted = sampling.json_schema.get("properties", {"name": {"type": "string"}})
    return json.dumps({name: SAMPLES[of["type"]] for name, of in wanted.items()})


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[FakeEngine]]:
    """Those that memories and chat models have opened, of this process or of a server."""
    monkeypatch.chdir(tmp_path)
    opened: list[FakeEngine] = []

    def open_engine(*args: Any) -> FakeEngine:
        opened.append(FakeEngine(answer))
        return opened[-1]

    for place in ("mem0.adapter", "langchain.source"):
        monkeypatch.setattr(f"inferscale_mem.adapters.{place}.open_engine", open_engine)
    # The model on a server is on no hub here.
    monkeypatch.setattr("inferscale_mem.adapters.mem0.adapter.resolve_model", lambda settings: settings.model)
    yield opened
    for engine in opened:
        engine.close()


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in PAGES for name in blocks(page)])
def test_its_code_runs(page: str, name: str, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks(page)[name]
    run_block(page, name)
    said = capsys.readouterr().out
    assert "Rex" in said and "ism1." not in said and "None" not in said
    remembers = "memory.add(" in code or "add=True" in code or "store.put(" in code
    prompts = [(plan, engine.tokenizer.decode(plan.token_ids)) for engine in engines for plan, _ in engine.requests]
    assert remembers == any("My dog is called Rex." in prompt and plan.facts for plan, prompt in prompts)


def test_every_way_to_use_it_is_shown() -> None:
    assert [len(blocks(page)) for page in PAGES] == [5, 2]


class Dog(BaseModel):
    """A dog."""

    name: str
    age: int


def test_what_max_tokens_cuts_off_comes_as_the_page_says(engines: list[FakeEngine]) -> None:
    chat = ChatInferScale(max_tokens=5)
    assert chat.with_structured_output(Dog).invoke("Rex") is None
    told = chat.with_structured_output(Dog, include_raw=True).invoke("Rex")
    assert told["parsed"] is None and told["parsing_error"] is None and told["raw"].invalid_tool_calls
    assert told["raw"].response_metadata["finish_reason"] == "length"
    for method in ("json_schema", "json_mode"):
        with pytest.raises(OutputParserException):
            chat.with_structured_output(Dog, method=method).invoke("Rex")
        told = chat.with_structured_output(Dog, method=method, include_raw=True).invoke("Rex")
        assert told["parsed"] is None and isinstance(told["parsing_error"], OutputParserException)
    assert chat.with_structured_output(Dog.model_json_schema(), method="json_schema").invoke("Rex") == {}


def test_a_chain_keeps_the_keywords_of_its_call_from_the_model_as_the_page_says(engines: list[FakeEngine]) -> None:
    """Should LangChain hand them on one day, the page is to say so."""
    chain = ChatPromptTemplate([("human", "{question}")]) | ChatInferScale()
    answer = chain.invoke({"question": "Rex?"}, memories="no handles: an error, if the model saw them")
    assert answer.response_metadata["inferscale"]["facts_requested"] == 0
