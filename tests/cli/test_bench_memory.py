"""``bench memory`` on few facts: real Mem0, real Qdrant, the real embedder; the engine is the fake one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_helpers
import pytest

from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.cli import main as cli
from inferscale_mem.cli.bench import memories, memory
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import SelfTestError
from inferscale_mem.testing import FakeEngine

FACTS = 40


@pytest.fixture(scope="module")
def embedder() -> LocalEmbedder:
    return LocalEmbedder()


@pytest.fixture
def pair(embedder: LocalEmbedder) -> Iterator[memories.Pair]:
    engine = FakeEngine()
    vectors = memories.embeddings(embedder, FACTS)
    with memories.opened(vectors, embedder, engine, InferScaleConfig.from_env()) as pair:
        yield pair
    engine.close()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench_helpers.use(monkeypatch, lambda settings, key: FakeEngine(key=key))
    file = tmp_path / "memory.json"
    given = ["bench", "memory", "--facts", "30,60", "--repeat", "3", "--repeat-add", "2", "--json", str(file)]
    assert cli.main(given) == 0
    shown = capsys.readouterr()
    assert "storing facts" in shown.err and "add infer=True" in shown.out
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["facts"], row["operation"], row["memory"], row["n"]) for row in result["rows"]] == [
        (facts, operation, name, count)
        for facts in (30, 60)
        for operation, count in ((memory.SEARCH, 3), (memory.RAW, 2), (memory.INFER, 2))
        for name in ("mem0", "inferscale")
    ]
    for row in result["rows"]:
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert row["mem0"] and row["embedder"] and row["model"] == "fake" and row["time"]
    assert [row["ratio"] > 0 for row in result["ratios"]] == [True] * 6
    assert file.with_suffix(".png").stat().st_size > 1000


def test_both_hold_the_same_and_share_their_models(pair: memories.Pair, embedder: LocalEmbedder) -> None:
    assert pair.mem0.embedding_model is pair.ours.embedding_model is embedder
    assert pair.ours.llm.inner is pair.mem0.llm is pair.llm
    assert not isinstance(pair.mem0, type(pair.ours))
    assert pair.ours.vector_store.resident
    memory.check_stored(pair, FACTS)
    memory.check_searches(pair, FACTS)


def test_what_differs_is_found_before_anything_is_timed(pair: memories.Pair) -> None:
    (hit, *_) = pair.mem0.search(memories.question(0), filters={"user_id": memories.OWNER})["results"]
    pair.mem0.delete(hit["id"])
    with pytest.raises(SelfTestError, match=r"differently|different facts"):
        memory.measure(pair, FACTS, 1, 1)
    with pytest.raises(SelfTestError, match="facts are stored"):
        memory.check_stored(pair, FACTS)


def test_an_add_that_stores_nothing_is_found(pair: memories.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pair.ours), "add", lambda self, *args, **kwargs: {"results": []})
    with pytest.raises(SelfTestError):
        memory.measure(pair, FACTS, 1, 1)


def test_facts_are_all_different() -> None:
    assert len({memories.fact_text(n) for n in range(2000)}) == 2000


@pytest.mark.parametrize("given", [["--facts", "0"], ["--facts", "few"], ["--repeat", "0"], ["--repeat-add", "-1"]])
def test_bad_arguments(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", "memory", *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "error" in capsys.readouterr().err
