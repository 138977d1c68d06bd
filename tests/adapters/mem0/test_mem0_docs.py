"""The migration page is true: its code runs, as far as the packages are installed, and its table is held by tests."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale_mem.testing import FakeEngine

PAGE = Path(__file__).parents[3] / "docs" / "mem0.md"
SECTION = re.compile(r"^#+ ([^\n]*)$|^```python\n(.*?)^```$", re.M | re.S)
NEEDS_A_KEY = "Coming from Mem0 1"
"""Mem0's own constructor, as it was before."""


def blocks() -> dict[str, str]:
    """Heading and number -> code."""
    found: dict[str, str] = {}
    heading, number = "", 0
    for match in SECTION.finditer(PAGE.read_text(encoding="utf-8")):
        if match[1]:
            heading, number = match[1], 0
        else:
            number += 1
            found[f"{heading} {number}"] = match[2]
    return found


def packages(code: str) -> set[str]:
    """Top-level packages that the code imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    return names


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Runs a block; the engine is the fake one, and the server that a client asks is not there."""
    monkeypatch.chdir(tmp_path)
    engines: list[FakeEngine] = []

    def open_engine(*args: Any) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    monkeypatch.setattr("inferscale_mem.adapters.mem0.adapter.open_engine", open_engine)

    def run_block(name: str) -> dict[str, Any]:
        code = blocks()[name]
        for package in sorted(packages(code)):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed; the code is only parsed")
        namespace: dict[str, Any] = {"__name__": "page"}
        exec(compile(code, f"mem0.md: {name}", "exec"), namespace)
        return namespace

    yield run_block
    for engine in engines:
        engine.close()


def test_there_are_ten_ways() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"^### ", page, re.M)) == 10
    assert len(blocks()) == 14 and all(ast.parse(code) for code in blocks().values())


@pytest.mark.parametrize("name", [name for name in blocks() if name != NEEDS_A_KEY])
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
    if "print(" in blocks()[name]:
        assert said.strip()
    memory = namespace.get("memory")
    if memory is not None:
        memory.close()


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
