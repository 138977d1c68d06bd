"""``inferscale-mem bench throughput``: requests at once, three ways in one run, each request another user's."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
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
from inferscale_mem.config import MEGABYTE
from inferscale_mem.errors import InputError, SelfTestError
from inferscale_mem.types import PromptPlan, Sampling

GOALS = {"injected_over_text": ">= 18 on CPU, 5 on a GPU, at 16", "injected_over_warm": ">= 0.95 at 16"}
HOW = (
    "a wave is so many requests sent at one moment, each of another user with facts of its own; its rate is requests "
    "divided by the seconds until the last answer is complete, greedy and of fixed length. Per number of requests, "
    "after one uncounted round: rounds of a wave of text (prefix cache cold), of the latest such texts once more "
    "(warm; sent uncounted right before), and of injected (facts in another order each time); warm and injected take "
    "turns in going first; medians; memory block on a block boundary"
)
PICTURE = {"title": "Throughput", "x": "requests at once", "y": "output tokens per second (median)"}


@dataclass(frozen=True)
class Rates:
    """Requests per second of one number of requests at once and one mode.

    Attributes:
        concurrency: requests at once.
        mode: how they were served.
        per_s: one per wave.
        output_tokens: of each answer.
        prompt_tokens: of each request.
    """

    concurrency: int
    mode: Mode
    per_s: tuple[float, ...]
    output_tokens: int
    prompt_tokens: int

    @property
    def median(self) -> float:
        """Requests per second."""
        return statistics.median(self.per_s)

    def as_row(self) -> dict[str, Any]:
        """As written to JSON."""
        return {
            "concurrency": self.concurrency,
            "mode": self.mode,
            **spread("requests_per_s", self.per_s),
            "output_tokens_per_s_median": round(self.output_tokens * self.median, 3),
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench throughput``."""
    default = counts(1)("1,4,16")
    parser.add_argument("--concurrency", type=counts(1), default=default, help="requests at once (1,4,16)")
    parser.add_argument("--k", type=int, default=50, help="facts in each prompt (50)")
    parser.add_argument("--tokens", type=int, default=16, help="output tokens of each answer (16)")
    parser.add_argument("--repeat", type=int, default=7, help="waves of warm and injected (7)")
    parser.add_argument("--repeat-text", type=int, default=3, help="waves of plain text (3)")
    parser.add_argument("--kv-cache-mib", type=int, help="paged cache (default: the engine's)")
    parser.add_argument("--record-mib", type=int, default=1024, help="records (1024)")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if min(args.k, args.tokens, args.repeat_text, args.record_mib) < 1 or args.repeat < args.repeat_text:
        raise InputError("All numbers must be 1 or more, and --repeat at least --repeat-text.")
    if args.json:
        check_pictures()
    cache = {"kv_cache_bytes": args.kv_cache_mib * MEGABYTE} if args.kv_cache_mib else {}
    with opened(args, record_bytes=args.record_mib * MEGABYTE, **cache) as bench:
        users = make_users(bench, max(args.concurrency), args.k)
        check_exact(bench.engine, *users)
        rates = [
            row
            for number in args.concurrency
            for row in measure(bench, users[:number], args.tokens, args.repeat, args.repeat_text)
        ]
        meta = machine(bench.engine, how=HOW, k=args.k, facts_tokens=FACT_TOKENS, question_tokens=QUESTION_TOKENS)
    ratios = [_ratio(rates, number) for number in args.concurrency]
    heads = ("requests at once", *(f"{mode} tokens/s" for mode in MODES), "injected / text", "injected / warm")
    print(table(heads, [_cells(rates, ratio) for ratio in ratios]))
    publish(args.json, [row.as_row() for row in rates], ratios, {**meta, "goals": GOALS}, _lines(rates), PICTURE)
    return 0


def make_users(bench: Bench, count: int, k: int) -> list[Workload]:
    """So many users with k facts each, all of which have records.

    Raises:
        SelfTestError: the engine did not keep the records.
    """
    users = []
    for number in range(count):
        progress(f"encoding {k} facts of user {number + 1} of {count}")
        users.append(make_workload(bench.engine, k, bench.signer))
    return users


def measure(bench: Bench, users: Sequence[Workload], tokens: int, repeat: int, repeat_text: int) -> list[Rates]:
    """Rates of all modes, one request of each user at once.

    Raises:
        SelfTestError: a request was not served the way it was meant to be.
    """
    found: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    texts: list[PromptPlan] = []
    for turn in range(repeat + 1):
        progress(f"{len(users)} requests at once: round {turn + 1} of {repeat + 1}")
        if turn <= repeat_text:
            texts = [user.unseen_text(bench.engine) for user in users]
            seconds = _wave(bench, "text", texts, users, tokens)
            found["text"] += [len(users) / seconds] * bool(turn)
        plans: dict[Mode, list[PromptPlan]] = {"warm": texts, "injected": [user.reordered() for user in users]}
        for mode in in_turns(tuple(plans), turn):
            if mode == "warm":  # what other waves have evicted in the meantime is put back, uncounted
                ask_at_once(bench.engine, texts, FIRST)
            seconds = _wave(bench, mode, plans[mode], users, tokens)
            found[mode] += [len(users) / seconds] * bool(turn)
    length = len(users[0].injected.token_ids)
    return [Rates(len(users), mode, tuple(found[mode]), tokens, length) for mode in MODES]


def _wave(bench: Bench, mode: Mode, plans: Sequence[PromptPlan], users: Sequence[Workload], tokens: int) -> float:
    """Seconds that all requests took together."""
    sampling = Sampling(max_tokens=tokens, min_tokens=tokens, temperature=0.0, ignore_eos=True)
    seconds, answers = ask_at_once(bench.engine, plans, sampling)
    for user, answer in zip(users, answers, strict=True):
        check_served(mode, answer.report, user)
        if answer.tokens != tokens:
            raise SelfTestError(f"{NAMES[mode]}: an answer has {answer.tokens} tokens, {tokens} were asked for.")
    return seconds


def _median(rates: Sequence[Rates], concurrency: int, mode: Mode) -> float:
    return next(row.median for row in rates if (row.concurrency, row.mode) == (concurrency, mode))


def _ratio(rates: Sequence[Rates], concurrency: int) -> dict[str, Any]:
    text, warm, injected = (_median(rates, concurrency, mode) for mode in MODES)
    return {
        "concurrency": concurrency,
        "injected_over_text": round(injected / text, 3),
        "injected_over_warm": round(injected / warm, 3),
        "warm_over_text": round(warm / text, 3),
    }


def _cells(rates: Sequence[Rates], ratio: dict[str, Any]) -> list[str]:
    number = ratio["concurrency"]
    tokens = rates[0].output_tokens
    speeds = (f"{tokens * _median(rates, number, mode):.1f}" for mode in MODES)
    return [str(number), *speeds, f"{ratio['injected_over_text']:.2f}", f"{ratio['injected_over_warm']:.3f}"]


def _lines(rates: Sequence[Rates]) -> dict[str, list[tuple[float, float]]]:
    return {
        NAMES[mode]: [(row.concurrency, row.output_tokens * row.median) for row in rates if row.mode == mode]
        for mode in MODES
    }
