"""``bench ttft`` and ``bench throughput``: what they send, what they check, what they write. Nothing about times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_helpers
import pytest
import tiny_models

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.bench import measuring, throughput, ttft
from inferscale_mem.cli.bench.measuring import Bench, Mode
from inferscale_mem.cli.bench.prompts import FACT_TOKENS, Workload, make_workload
from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import SelfTestError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import InjectReport

KEY = bytes(range(32))
SIGNER = HandleSigner(KEY, "tests")
THROUGHPUT = ("--concurrency", "1,3", "--k", "4", "--tokens", "3", "--repeat", "3", "--repeat-text", "2")


def bench_on(engine: FakeEngine) -> Bench:
    return Bench(engine, InferScaleConfig.from_env(), SIGNER)


@pytest.fixture(scope="module")
def open_small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Engine]:
    """Opens a tiny model in float32, on transformers."""
    path = tiny_models.save("llama", tmp_path_factory.mktemp("model"))
    return lambda key: TransformersEngine(path, EngineConfig(dtype="float32"), key)


def test_ttft_on_a_real_model(
    open_small: Callable[[bytes], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_helpers.use(monkeypatch, lambda settings, key: open_small(key))
    result = bench_helpers.run("ttft", tmp_path / "ttft.json", "--k", "0,3", "--repeat", "3", "--repeat-text", "2")
    assert [(row["k"], row["mode"], row["n"]) for row in result["rows"]] == [
        (k, mode, 2 if mode == "text" else 3) for k in (0, 3) for mode in measuring.MODES
    ]
    for row in result["rows"]:
        assert 0 < row["ttft_ms_min"] <= row["ttft_ms_q1"] <= row["ttft_ms_median"] <= row["ttft_ms_max"]
    assert [ratio["k"] for ratio in result["ratios"]] == [0, 3]


def test_throughput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engines: list[FakeEngine] = []

    def made(settings: InferScaleConfig, key: bytes) -> FakeEngine:
        engines.append(bench_helpers.fake(key))
        return engines[-1]

    bench_helpers.use(monkeypatch, made)
    result = bench_helpers.run("throughput", tmp_path / "throughput.json", *THROUGHPUT)
    assert [(row["concurrency"], row["mode"], row["n"]) for row in result["rows"]] == [
        (number, mode, 2 if mode == "text" else 3) for number in (1, 3) for mode in measuring.MODES
    ]
    for row in result["rows"]:
        assert 0 < row["requests_per_s_min"] <= row["requests_per_s_median"] <= row["requests_per_s_max"]
        assert row["output_tokens_per_s_median"] == pytest.approx(3 * row["requests_per_s_median"], abs=0.01)
    assert {"injected_over_text", "injected_over_warm"} <= set(result["ratios"][1]) & set(result["meta"]["goals"])
    shown = capsys.readouterr()
    assert "3 requests at once: round" in shown.err and "injected / warm" in shown.out
    plans = [plan for plan, _ in engines[0].requests]
    users = {plan.scope.user_id for plan in plans if plan.scope}
    assert len(users) == 3, "each request at once is another user's"
    assert len({plan.facts[0].record for plan in plans if plan.facts}) == 3 * 4, "in another order each time"


def test_what_is_injected_was_never_sent_before() -> None:
    """Else the prefix cache would serve it, and nothing would be injected: few facts have few orders."""
    engine = bench_helpers.fake(KEY, record_bytes=64 << 20)
    bench = bench_on(engine)

    def sent(before: int) -> list[tuple[Any, ...]]:
        return [plan.segments for plan, _ in engine.requests[before:] if plan.segments[0].record]

    for k in (0, 1, 2, 3):
        before = len(engine.requests)
        rows = ttft.measure(bench, k, 7, 2)
        # Once by the check before, in the same order as the round that does not count.
        found = sent(before)
        assert len(found) == 9 and found[0] == found[1] and len(set(found)) == 8
        assert [len(row.ttft_ms) for row in rows] == [2, 7, 7]
    users = throughput.make_users(bench, 2, 4)
    before = len(engine.requests)
    for number in (1, 2):  # the same user at both concurrencies
        throughput.measure(bench, users[:number], 2, 3, 1)
    assert len(sent(before)) == len(set(sent(before))) == 4 + 2 * 4
    with pytest.raises(SelfTestError, match="only 8 orders"):
        throughput.measure(bench, users, 2, 3, 1)
    engine.close()


def test_text_is_new_each_time_and_warm_is_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench_helpers.fake(KEY)
    users = throughput.make_users(bench_on(engine), 2, 3)
    throughput.measure(bench_on(engine), users, 2, 3, 2)
    texts = [tuple(plan.token_ids) for plan, _ in engine.requests if not plan.facts]
    # Rounds 0 to 2: two texts, the same two twice more (uncounted, warm). Round 3: those of round 2, twice.
    assert len(texts) == 3 * 6 + 4 and len(set(texts)) == 6
    assert texts[-2:] == texts[-4:-2] == texts[-6:-4]
    assert all(len(set(prefix)) == 6 for prefix in [[text[:5] for text in set(texts)]])
    engine.close()


@pytest.mark.parametrize("measured", ["ttft", "throughput"])
def test_what_is_not_injected_is_an_error(measured: str) -> None:
    """The engine loses its records after answers were checked."""
    engine = bench_helpers.fake(KEY)
    bench = bench_on(engine)
    users = throughput.make_users(bench, 2, 3)
    measuring.check_exact(engine, *users)
    engine.evict_all()
    with pytest.raises(SelfTestError, match="0 tokens and 0 facts were injected"):
        if measured == "ttft":
            ttft._ttft(engine, "injected", users[0].reordered(), users[0])
        else:
            throughput.measure(bench, users, 2, 1, 1)
    engine.close()


def test_an_engine_that_keeps_no_records_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_helpers.use(monkeypatch, lambda settings, key: bench_helpers.fake(key, connector=False))
    for name in ("ttft", "throughput"):
        assert cli.main(["bench", name]) == 1
        assert "records were not made" in capsys.readouterr().err


def test_other_answers_are_an_error(open_small: Callable[[bytes], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_small(KEY)
    workload = make_workload(engine, 2, SIGNER)
    measuring.check_exact(engine, workload)
    monkeypatch.setattr(Workload, "text", property(lambda self: self.unseen_text(engine)))
    with pytest.raises(SelfTestError, match="KL"):
        measuring.check_exact(engine, workload)
    engine.close()


def test_short_answers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench_helpers.fake(KEY)
    bench = bench_on(engine)
    users = throughput.make_users(bench, 1, 1)
    asked = measuring.ask_at_once
    monkeypatch.setattr(
        throughput, "ask_at_once", lambda e, p, sampling: asked(e, p, replace(sampling, max_tokens=1, min_tokens=0))
    )
    with pytest.raises(SelfTestError, match="1 tokens, 4 were asked for"):
        throughput.measure(bench, users, 4, 1, 1)
    engine.close()


@pytest.fixture
def workload() -> Workload:
    engine = bench_helpers.fake(KEY)
    made = make_workload(engine, 2, SIGNER)
    engine.close()
    return made


Served = Callable[[Mode, dict[str, Any]], None]


@pytest.fixture
def served(workload: Workload) -> Served:
    """Checks a report that says what the mode wants, but for some fields."""
    before = len(workload.header.token_ids) + 2 * FACT_TOKENS
    right: dict[Mode, InjectReport] = {
        "text": InjectReport(0, 0, 0, before + 20, tokens_cached=0),
        "warm": InjectReport(0, 0, 0, before + 20, tokens_cached=before),
        "injected": InjectReport(2, 2, before, 20, tokens_cached=before),
    }
    return lambda mode, changes: measuring.check_served(mode, replace(right[mode], **changes), workload)


@pytest.mark.parametrize("mode", measuring.MODES)
def test_what_is_right(served: Served, mode: Mode) -> None:
    served(mode, {})
    served(mode, {"tokens_cached": None})


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("text", {"tokens_cached": 16}),
        ("text", {"tokens_injected": 1}),
        ("warm", {"tokens_cached": 40}),
        ("warm", {"tokens_injected": 44, "facts_injected": 2}),
        ("injected", {"facts_injected": 1}),
        ("injected", {"tokens_injected": 30}),
    ],
)
def test_what_is_not(served: Served, mode: Mode, changes: dict[str, Any]) -> None:
    with pytest.raises(SelfTestError):
        served(mode, changes)


@pytest.mark.parametrize(
    "given",
    [
        ["ttft", "--k", "-1"],
        ["ttft", "--repeat", "0"],
        ["throughput", "--concurrency", "0"],
        ["throughput", "--concurrency", "many"],
        ["throughput", "--tokens", "0"],
        ["throughput", "--repeat", "1", "--repeat-text", "2"],
    ],
)
def test_bad_arguments(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "error" in capsys.readouterr().err
