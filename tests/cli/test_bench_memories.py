"""``bench e2e`` and ``bench encode`` on few facts: real Mem0, real Qdrant, the real embedder, a real recorder; the
engine is the fake one, or a tiny model. Nothing about times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_helpers
import pytest
import tiny_models

from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.adapters.mem0.index import VectorIndex
from inferscale_mem.cli import main as cli
from inferscale_mem.cli.bench import e2e, encode, memories
from inferscale_mem.cli.bench.measuring import Bench
from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import SelfTestError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.testing import FakeEngine

KEY = bytes(range(32))
FACTS = 24


@pytest.fixture(scope="module")
def embedder() -> LocalEmbedder:
    return LocalEmbedder()


@pytest.fixture(scope="module")
def vectors(embedder: LocalEmbedder) -> list[list[float]]:
    return memories.embeddings(embedder, FACTS)


@pytest.fixture
def bench() -> Iterator[Bench]:
    settings = InferScaleConfig.from_env({"handle_key": KEY.hex()})
    engine = bench_helpers.fake(KEY)
    yield Bench(engine, settings, HandleSigner(KEY, "bench"))
    engine.close()


@pytest.fixture
def pair(bench: Bench, vectors: list[list[float]], embedder: LocalEmbedder) -> Iterator[memories.Pair]:
    with memories.opened(vectors, embedder, bench.engine, bench.settings) as pair:
        yield pair


@pytest.fixture
def index(bench: Bench, vectors: list[list[float]], embedder: LocalEmbedder) -> Iterator[VectorIndex]:
    with memories.indexed(vectors, embedder, bench.signer) as index:
        yield index


def test_e2e(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench_helpers.use(monkeypatch, lambda settings, key: bench_helpers.fake(key))
    result = bench_helpers.run("e2e", tmp_path / "e2e.json", "--facts", "24", "--k", "6", "--repeat", "2")
    assert [(row["facts"], row["variant"], row["n"]) for row in result["rows"]] == [
        (24, variant, 2) for variant in e2e.NAMES
    ]
    for row in result["rows"]:
        assert row["search_ms_median"] + row["ttft_ms_median"] <= row["ms_max"]
        assert (row["search_ms_median"] > 0) == (row["variant"] != "warm")
    assert {"over_warm_ms", "mem0_over_injected"} <= set(result["ratios"][0])
    shown = capsys.readouterr()
    assert "question 3 of 3" in shown.err and "over the warm prefix cache" in shown.out


def test_e2e_sends_handles_text_and_the_same_again(bench: Bench, pair: memories.Pair) -> None:
    engine = bench.engine
    assert isinstance(engine, FakeEngine)
    e2e.measure(bench, pair, FACTS, 6, 1)
    asked = [plan for plan, _ in engine.requests[-8:]]  # two rounds
    injected = [plan for plan in asked if plan.facts]
    texts = [engine.tokenizer.decode(plan.token_ids) for plan in asked if not plan.facts]
    assert [len(plan.facts) for plan in injected] == [6, 6] and len(texts) == 6
    own = [engine.tokenizer.decode(plan.token_ids) for plan in injected]
    assert all(texts.count(text) == 2 for text in own), "the floor is our own prompt, twice"
    (loop,) = [text for text in texts[-3:] if text not in own]
    told = [sorted(line for line in text.splitlines() if line.startswith("- ")) for text in (loop, own[-1])]
    assert told[0] == told[1] and len(told[0]) == 6, "Mem0's loop is told the same"


def test_e2e_finds_what_is_not_injected(bench: Bench, pair: memories.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(bench.engine, FakeEngine)
    waited = e2e._wait_for_records

    def lose(*given: Any) -> None:
        waited(*given)
        bench.engine.evict_all()  # type: ignore[attr-defined]

    monkeypatch.setattr(e2e, "_wait_for_records", lose)
    with pytest.raises(SelfTestError, match="0 facts were injected, 6 expected"):
        e2e.measure(bench, pair, FACTS, 6, 1)


def test_e2e_without_records_is_an_error(vectors: list[list[float]], embedder: LocalEmbedder) -> None:
    settings = InferScaleConfig.from_env({"handle_key": KEY.hex()})
    engine = bench_helpers.fake(KEY, connector=False)
    bench = Bench(engine, settings, HandleSigner(KEY, "bench"))
    with (
        memories.opened(vectors, embedder, engine, settings) as pair,
        pytest.raises(SelfTestError, match=f"0 of {FACTS} facts have records"),
    ):
        e2e.measure(bench, pair, FACTS, 6, 1)
    engine.close()


def test_encode_on_a_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Facts of some 90 tokens, of a byte each: a chain computes only those; a window its facts again."""
    path = tiny_models.save("llama", tmp_path / "model", max_position_embeddings=2048)
    bench_helpers.use(monkeypatch, lambda settings, key: TransformersEngine(path, EngineConfig(dtype="float32"), key))
    given = ("--facts", "6", "--batch", "3", "--policies", "fact_chain(2); fact_window(2)")
    result = bench_helpers.run("encode", tmp_path / "encode.json", *given)
    chain, window = result["rows"]
    assert (chain["policy"], window["policy"]) == ("fact_chain(2, nearest)", "fact_window(2)")
    assert chain["facts"] == 6 and chain["n"] == 2
    assert chain["tokens_per_own_token"] == 1.0
    assert chain["prefilled_per_fact"] == chain["own_tokens_per_fact"] and chain["injected_per_fact"] > 0
    assert window["tokens_per_own_token"] > 2
    assert result["ratios"][0]["facts_per_s_over_first"] == 1.0
    assert "encoding facts: 3 of 6" in capsys.readouterr().err


def test_encode_finds_a_fact_without_a_record(bench: Bench, index: VectorIndex) -> None:
    assert isinstance(bench.engine, FakeEngine)
    bench.engine.fail_next(encode.InputError("too odd"), on="encode")
    with pytest.raises(SelfTestError, match=r"3 of 4 facts were encoded: .*too odd"):
        encode.measure(bench, index, ("alone",), 4)


def test_encode_finds_a_chain_that_stands_on_nothing(
    bench: Bench, index: VectorIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode.measure(bench, index, ("fact_chain(2, nearest)",), FACTS)
    monkeypatch.setattr(type(index), "nearest", lambda self, fact, m, below: [])
    with pytest.raises(SelfTestError, match="on top of earlier facts"):
        encode.measure(bench, index, ("fact_chain(3, nearest)",), FACTS)


def test_encode_finds_chains_that_are_not_injected(
    bench: Bench, index: VectorIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode.check_chain(bench, index)
    encoded = encode._encode

    def lose(*given: Any) -> float:
        seconds = encoded(*given)
        bench.engine.evict_all()  # type: ignore[attr-defined]
        return seconds

    monkeypatch.setattr(encode, "_encode", lose)
    with pytest.raises(SelfTestError, match="not injected"):
        encode.check_chain(bench, index)


@pytest.mark.parametrize(
    "given",
    [
        ["e2e", "--facts", "10", "--k", "11"],
        ["e2e", "--repeat", "0"],
        ["encode", "--facts", "10", "--batch", "3"],
        ["encode", "--policies", "magic(3)"],
        ["encode", "--policies", ";"],
    ],
)
def test_bad_arguments(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "error" in capsys.readouterr().err
