"""``inferscale-mem bench ttft``: time to first token against the number of memories, three ways in one run."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_mem.cli.bench.measuring import (
    FIRST,
    MODES,
    NAMES,
    Bench,
    Mode,
    add_common_arguments,
    ask_at_once,
    check_exact,
    check_served,
    counts,
    in_turns,
    opened,
    spread,
)
from inferscale_mem.cli.bench.prompts import FACT_TOKENS, QUESTION_TOKENS, Workload, make_workload
from inferscale_mem.cli.bench.report import check_pictures, machine, progress, publish, table
from inferscale_mem.errors import InputError
from inferscale_mem.protocols import Engine
from inferscale_mem.types import PromptPlan


@dataclass(frozen=True)
class Times:
    """Times to first token of one k and mode, in milliseconds."""

    k: int
    mode: Mode
    prompt_tokens: int
    ttft_ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.ttft_ms)

    def as_row(self) -> dict[str, Any]:
        """As written to JSON."""
        times = spread("ttft_ms", self.ttft_ms)
        return {"k": self.k, "mode": self.mode, **times, "prompt_tokens": self.prompt_tokens}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench ttft``."""
    default = counts(0)("0,5,10,20,50")
    parser.add_argument("--k", type=counts(0), default=default, help="numbers of facts (0,5,10,20,50)")
    parser.add_argument("--repeat", type=int, default=9, help="measurements of warm and injected (9)")
    parser.add_argument("--repeat-text", type=int, default=5, help="measurements of plain text (5)")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if min(args.repeat, args.repeat_text) < 1:
        raise InputError("--repeat and --repeat-text must be 1 or more.")
    if args.json:
        check_pictures()
    with opened(args) as bench:
        times = [row for k in args.k for row in measure(bench, k, args.repeat, args.repeat_text)]
        meta = machine(bench.engine, how=HOW, facts_tokens=FACT_TOKENS, question_tokens=QUESTION_TOKENS)
    ratios = [_ratio(times, k) for k in args.k]
    print(table(("k", "prompt tokens", "text ms", "warm prefix cache ms", "injected ms", "text / injected",
                 "injected / warm"), _table_rows(times, ratios)))  # fmt: skip
    publish(args.json, [row.as_row() for row in times], ratios, meta, _lines(times), PICTURE)
    return 0


HOW = (
    "per k, after one uncounted round: rounds of text (prefix cache cold), and warm (the same text again) and injected "
    "(the facts in another order each time; another user's facts when all orders were sent), which take turns in going "
    "first; max_tokens=1; medians; memory block on a block boundary"
)
PICTURE = {"title": "Time to first token", "x": "memories in the prompt", "y": "milliseconds (median)"}


def measure(bench: Bench, k: int, repeat: int, repeat_text: int) -> list[Times]:
    """Times of one k in all modes.

    Raises:
        SelfTestError: injected answers differ from plain ones, or a request was not served the way it was meant to be.
    """
    workload = make_workload(bench.engine, k, bench.signer)
    check_exact(bench.engine, workload)
    found: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    rounds = max(repeat, repeat_text) + 1
    for turn in range(rounds):
        progress(f"k={k}: round {turn + 1} of {rounds}")
        if 0 < turn <= repeat and turn % workload.orders == 0:
            workload = _another(bench, k)
        for mode, plan in _plans(bench.engine, workload, turn, with_text=turn <= repeat_text, with_rest=turn <= repeat):
            spent = _ttft(bench.engine, mode, plan, workload)
            if turn:
                found[mode].append(spent)
    length = len(workload.injected.token_ids)
    return [Times(k, mode, length, tuple(found[mode])) for mode in MODES]


def _another(bench: Bench, k: int) -> Workload:
    """Few facts have few orders, and one that was sent before is in the prefix cache: another user's facts, then."""
    workload = make_workload(bench.engine, k, bench.signer)
    ask_at_once(bench.engine, [workload.text], FIRST)  # so that warm is warm
    return workload


def _plans(
    engine: Engine, workload: Workload, turn: int, with_text: bool, with_rest: bool
) -> Iterator[tuple[Mode, PromptPlan]]:
    if with_text:
        yield "text", workload.unseen_text(engine)
    rest: tuple[Mode, Mode] = ("warm", "injected")
    for mode in in_turns(rest, turn) if with_rest else ():
        yield mode, workload.text if mode == "warm" else workload.reordered()


def _ttft(engine: Engine, mode: Mode, plan: PromptPlan, workload: Workload) -> float:
    report = next(chunk.report for chunk in engine.generate(plan, FIRST) if chunk.report)
    check_served(mode, report, workload)
    assert report.ttft_ms is not None
    return report.ttft_ms


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
    return {NAMES[mode]: [(row.k, row.median) for row in times if row.mode == mode] for mode in MODES}
