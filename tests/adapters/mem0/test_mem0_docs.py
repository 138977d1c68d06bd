"""The migration page is true: its code runs, as far as the packages are installed, and its table is held by tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_code import DOCS, blocks, run_block

from inferscale_mem.testing import FakeEngine

PAGE = "mem0.md"
NEEDS_A_KEY = "Coming from Mem0 1"
"""Mem0's own constructor, as it was before."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Runs a block; the engine is the fake one, and the server that a client asks is not there."""
    monkeypatch.chdir(tmp_path)
    engines: list[FakeEngine] = []

    def open_engine(*args: Any) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    monkeypatch.setattr("inferscale_mem.adapters.mem0.adapter.open_engine", open_engine)

    yield partial(run_block, PAGE)
    for engine in engines:
        engine.close()


def test_there_are_ten_ways() -> None:
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    assert len(re.findall(r"^### ", page, re.M)) == 10
    assert len(blocks(PAGE)) == 14 and all(ast.parse(code) for code in blocks(PAGE).values())


@pytest.mark.parametrize("name", [name for name in blocks(PAGE) if name != NEEDS_A_KEY])
def test_its_code_runs(name: str, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked: list[dict[str, Any]] = []
    if "OpenAI" in name:

        def create(self: Any, **request: Any) -> Any:
            asked.append(request)
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="Rex."))])

        monkeypatch.setattr("openai.resources.chat.completions.Completions.create", create)
    namespace = run(name)
    if "OpenAI" in name:
        assert "- ism1." in asked[0]["messages"][0]["content"]
    said = capsys.readouterr().out
    assert "ism1." not in said
    if "print(" in blocks(PAGE)[name]:
        assert said.strip()
    memory = namespace.get("memory")
    if memory is not None:
        memory.close()


@pytest.mark.parametrize("number", [1, 2])
def test_the_readmes_code_runs(number: int, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_block("../README.md", f"In a Mem0 app {number}")
    assert capsys.readouterr().out.strip()


def test_the_rest_server_serves(run: Any) -> None:
    app = run("A REST server 1")["app"]
    testclient = pytest.importorskip("fastapi.testclient")
    with testclient.TestClient(app) as client:
        owner = {"user_id": "alice"}
        added = client.post("/memories", params={**owner, "text": "My dog is called Rex."}).json()
        assert [fact["memory"] for fact in added["results"]] == ["My dog is called Rex."]
        answer = client.get("/answer", params={**owner, "question": "What is the name of my dog?"}).json()
        assert answer["facts_requested"] == 1 and answer["answer"]
        assert client.get("/answer", params={"user_id": "bob", "question": "Whose dog?"}).json()["facts_requested"] == 0
        client.delete("/memories", params=owner)
        assert client.get("/answer", params={**owner, "question": "My dog?"}).json()["facts_requested"] == 0


async def test_the_mcp_tools_answer(run: Any) -> None:
    namespace = run("An MCP server 1")
    server = namespace["server"]
    assert {tool.name for tool in await server.list_tools()} == {"remember", "recall"}
    await server.call_tool("remember", {"text": "My dog is called Rex."})
    assert "My dog is called Rex." in str(await server.call_tool("recall", {"question": "What is my dog called?"}))
    await namespace["memory"].aclose()
