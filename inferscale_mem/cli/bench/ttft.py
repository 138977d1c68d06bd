"""``inferscale-mem bench ttft``: time to first token against the number of memories, three ways in one run."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_mem.cli.bench.prompts import Workload, make_workload, mark_tokens
from inferscale_mem.cli.bench.report import check_writable, machine, progress, table, write_json, write_pictures
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.engines import open_engine
from inferscale_mem.engines.self_test import divergence, max_kl
from inferscale_mem.errors import InputError, SelfTestError
from inferscale_mem.protocols import Engine
from inferscale_mem.types import PromptPlan, Sampling

MODES = ("text", "warm", "injected")
FIRST = Sampling(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Times:
    """Times to first token of one k and mode, in milliseconds."""

    k: int
    mode: str
    prompt_tokens: int
    ttft_ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.ttft_ms)

    def as_row(self) -> dict[str, Any]:
        """As written to JSON."""
        return {
            "k": self.k,
            "mode": self.mode,
            "ttft_ms_median": round(self.median, 3),
            "ttft_ms_min": round(min(self.ttft_ms), 3),
            "ttft_ms_max": round(max(self.ttft_ms), 3),
            "n": len(self.ttft_ms),
            "prompt_tokens": self.prompt_tokens,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench ttft``."""
    parser.add_argument("--k", type=_counts, default=_counts("0,5,10,20,50"), help="numbers of facts (0,5,10,20,50)")
    parser.add_argument("--repeat", type=int, default=9, help="measurements of warm and injected (9)")
    parser.add_argument("--repeat-text", type=int, default=5, help="measurements of plain text (5)")
    parser.add_argument("--model", help="Hugging Face id or local path (default: as configured)")
    parser.add_argument("--json", metavar="FILE", help="write rows, ratios and machine here, and pictures beside it")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if min(args.repeat, args.repeat_text) < 1:
        raise InputError("--repeat and --repeat-text must be 1 or more.")
    if args.json:
        check_writable(args.json)
    progress("starting the engine")
    engine = open_engine(InferScaleConfig.from_env({"model": args.model}))
    try:
        times = [row for k in args.k for row in measure(engine, k, args.repeat, args.repeat_text)]
        meta = machine(engine, how=HOW, facts_tokens=22, question_tokens=20)
    finally:
        engine.close()
    ratios = [_ratio(times, k) for k in args.k]
    print(table(("k", "prompt tokens", "text ms", "warm prefix cache ms", "injected ms", "text / injected",
                 "injected / warm"), _table_rows(times, ratios)))  # fmt: skip
    if args.json:
        result = {"rows": [row.as_row() for row in times], "ratios": ratios, "meta": meta}
        for written in (write_json(args.json, result), *write_pictures(args.json, _lines(times), PICTURE)):
            print(f"wrote {written}")
    return 0


HOW = (
    "per k, after one uncounted round: rounds of text (prefix cache cold), warm (the same text again) and injected "
    "(the facts in another order each time), interleaved; max_tokens=1; medians; memory block on a block boundary"
)
PICTURE = {"title": "Time to first token", "x": "memories in the prompt", "y": "milliseconds (median)"}


def measure(engine: Engine, k: int, repeat: int, repeat_text: int) -> list[Times]:
    """Times of one k in all modes.

    Raises:
        SelfTestError: injected answers differ from plain ones, or a request was not served the way it was meant to be.
    """
    workload = make_workload(engine, k)
    _check(engine, workload)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    rounds = max(repeat, repeat_text) + 1
    for turn in range(rounds):
        progress(f"k={k}: round {turn + 1} of {rounds}")
        for mode, plan in _plans(engine, workload, turn, with_text=turn <= repeat_text, with_rest=turn <= repeat):
            spent = _ttft(engine, plan, workload if mode == "injected" else None)
            if turn:
                found[mode].append(spent)
    length = len(workload.injected.token_ids)
    return [Times(k, mode, length, tuple(found[mode])) for mode in MODES]


def _plans(
    engine: Engine, workload: Workload, turn: int, with_text: bool, with_rest: bool
) -> Iterator[tuple[str, PromptPlan]]:
    if with_text:
        yield "text", workload.unseen_text(mark_tokens(engine, turn))
    if with_rest:
        yield "warm", workload.text
        yield "injected", workload.reordered(turn)


def _ttft(engine: Engine, plan: PromptPlan, workload: Workload | None) -> float:
    report = next(chunk.report for chunk in engine.generate(plan, FIRST) if chunk.report)
    wanted = len(plan.token_ids) - len(workload.question.token_ids) if workload else 0
    if report.tokens_injected != wanted:
        raise SelfTestError(f"{report.tokens_injected} tokens were injected, {wanted} expected: {report.missed[:3]}")
    assert report.ttft_ms is not None
    return report.ttft_ms


def _check(engine: Engine, workload: Workload) -> None:
    """Answers first: records of the exact prefix must give what plain prefill gives."""
    top = Sampling(max_tokens=1, temperature=0.0, logprobs=50)
    plain, injected = (
        next(chunk.logprobs[0] for chunk in engine.generate(plan, top) if chunk.logprobs)
        for plan in (workload.text, workload.injected)
    )
    kl = divergence(plain, injected)
    if not kl <= max_kl(engine.info):
        raise SelfTestError(f"Injected and plain answers differ (KL {kl:.3g} nats), so times would mean nothing.")


def _median(times: Sequence[Times], k: int, mode: str) -> float:
    return next(row.median for row in times if (row.k, row.mode) == (k, mode))


def _ratio(times: Sequence[Times], k: int) -> dict[str, Any]:
    text, warm, injected = (_median(times, k, mode) for mode in MODES)
    return {
        "k": k,
        "text_over_injected": round(text / injected, 3),
        "injected_over_warm": round(injected / warm, 3),
        "text_over_warm": round(text / warm, 3),
    }


def _table_rows(times: Sequence[Times], ratios: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            str(ratio["k"]),
            str(next(row.prompt_tokens for row in times if row.k == ratio["k"])),
            *(f"{_median(times, ratio['k'], mode):.1f}" for mode in MODES),
            f"{ratio['text_over_injected']:.2f}",
            f"{ratio['injected_over_warm']:.3f}",
        ]
        for ratio in ratios
    ]


def _lines(times: Sequence[Times]) -> dict[str, list[tuple[float, float]]]:
    named = {"text": "plain text", "warm": "warm prefix cache (the floor)", "injected": "injected"}
    return {named[mode]: [(row.k, row.median) for row in times if row.mode == mode] for mode in MODES}


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0,5,10") from error
    if min(counts) < 0:
        raise argparse.ArgumentTypeError("numbers of facts cannot be negative")
    return tuple(dict.fromkeys(counts))
