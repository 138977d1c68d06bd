"""``inferscale-mem bench e2e``: from a query to the first token, search included, next to Mem0's loop, in one run."""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from inferscale_mem.cli.bench.measuring import (
    FIRST,
    Bench,
    add_common_arguments,
    ask_at_once,
    check_exact,
    counts,
    in_turns,
    opened,
    spread,
)
from inferscale_mem.cli.bench.memory import check_searches, meta_of
from inferscale_mem.cli.bench.prompts import as_text, make_workload
from inferscale_mem.cli.bench.report import check_pictures, progress, publish, table
from inferscale_mem.config import MEGABYTE
from inferscale_mem.errors import InputError, SelfTestError

if TYPE_CHECKING:  # loads Mem0
    from inferscale_mem.adapters.langchain import ChatInferScale
    from inferscale_mem.cli.bench.memories import Pair

Variant = Literal["mem0", "inferscale", "warm"]
NAMES: dict[Variant, str] = {
    "mem0": "Mem0's loop, text",
    "inferscale": "InferScale-Mem, injected",
    "warm": "warm prefix cache, no search (the floor)",
}
GOAL = "injected at most 15 ms over warm, at 1,000 facts"
SYSTEM = "You know the user, and answer in one short sentence. Memories:\n"
HOW = (
    "per round a question of its own. Mem0's loop: Memory.search, its texts in a system message, the chat model's "
    "first token. Ours: InferScaleMemory.search, its handles in the same message, the chat model's first token. Both "
    "by ChatInferScale on one engine, with one embedder, over copies of one store; they take turns in going first. The "
    "floor: time to first token of the tokens of our prompt as text, sent a second time, less so many of its first "
    "ones that the memories end on a block boundary. One uncounted round; medians; over_warm_ms is the median of "
    "each round's difference"
)
PICTURE = {"title": "Query to first token", "x": "facts stored", "y": "milliseconds (median)"}


@dataclass(frozen=True)
class Took:
    """What one question took, in milliseconds: all of it, the search, and the engine's own time to first token."""

    total: float
    search: float
    ttft: float
    prompt_tokens: int


@dataclass(frozen=True)
class Times:
    """All questions of one variant."""

    facts: int
    variant: Variant
    took: tuple[Took, ...]

    @property
    def total(self) -> list[float]:
        """Milliseconds of each."""
        return [one.total for one in self.took]

    def as_row(self) -> dict[str, Any]:
        """As written to JSON."""
        parts: dict[str, list[float]] = {
            "search_ms_median": [one.search for one in self.took],
            "ttft_ms_median": [one.ttft for one in self.took],
            "rest_ms_median": [one.total - one.search - one.ttft for one in self.took],
            "prompt_tokens_median": [one.prompt_tokens for one in self.took],
        }
        medians = {name: round(statistics.median(values), 3) for name, values in parts.items()}
        return {"facts": self.facts, "variant": self.variant, **spread("ms", self.total), **medians}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench e2e``."""
    parser.add_argument("--facts", type=counts(1), default=(1000,), help="facts stored, of one owner (1000)")
    parser.add_argument("--k", type=int, default=50, help="facts found and served (50)")
    parser.add_argument("--repeat", type=int, default=11, help="questions measured (11)")
    parser.add_argument("--record-mib", type=int, default=1024, help="records (1024)")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if min(args.k, args.repeat, args.record_mib) < 1 or min(args.facts) < args.k:
        raise InputError("--k, --repeat and --record-mib must be 1 or more, and --facts at least --k.")
    if args.json:
        check_pictures()
    from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
    from inferscale_mem.cli.bench import memories

    logging.getLogger("mem0").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)
    with opened(args, record_bytes=args.record_mib * MEGABYTE) as bench:
        embedder = LocalEmbedder()
        check_exact(bench.engine, make_workload(bench.engine, 5, bench.signer))
        vectors = memories.embeddings(embedder, max(args.facts))
        times: list[Times] = []
        for facts in args.facts:
            with memories.opened(vectors[:facts], embedder, bench.engine, bench.settings) as pair:
                times += measure(bench, pair, facts, args.k, args.repeat)
        meta = meta_of(bench.engine, str(embedder.config.model), how=HOW, k=args.k, goal=GOAL)
    ratios = [ratio(times, facts) for facts in args.facts]
    heads = ("facts", "variant", "ms", "search ms", "engine's first token ms", "rest ms", "prompt tokens")
    print(table(heads, [_cells(row) for row in times]))
    print("\n".join(f"{r['facts']} facts: {r['over_warm_ms']:.1f} ms over the warm prefix cache" for r in ratios))
    publish(args.json, [row.as_row() for row in times], ratios, meta, _lines(times), PICTURE)
    return 0


def measure(bench: Bench, pair: Pair, facts: int, k: int, repeat: int) -> list[Times]:
    """Times of all variants with so many facts stored.

    Raises:
        SelfTestError: the memories do not find the same, a fact has no record, or was not injected.
    """
    from inferscale_mem.adapters.langchain import ChatInferScale

    check_searches(pair, facts)
    _wait_for_records(pair, facts)
    chat = ChatInferScale(memory=pair.ours, temperature=0, max_tokens=1)
    found: dict[Variant, list[Took]] = {variant: [] for variant in NAMES}
    both: tuple[Variant, Variant] = ("mem0", "inferscale")
    for turn in range(repeat + 1):
        progress(f"{facts} facts: question {turn + 1} of {repeat + 1}")
        for variant in in_turns(both, turn):
            found[variant].append(_loop(pair, chat, variant, turn, k))
        found["warm"].append(_floor(bench, pair, turn, k))
    return [Times(facts, variant, tuple(took[1:])) for variant, took in found.items()]


def _wait_for_records(pair: Pair, facts: int) -> None:
    recorder = pair.ours.service.recorder
    while not recorder.wait(1.0) and recorder.pending:
        progress(f"encoding: {recorder.progress}")
    if (made := recorder.counters["encoded"]) < facts:
        why = ", ".join(sorted(set(recorder.failures.values()))) or "give them more room (--record-mib)"
        raise SelfTestError(f"Only {made} of {facts} facts have records: {why}")


def _loop(pair: Pair, chat: ChatInferScale, variant: Variant, turn: int, k: int) -> Took:
    memory = pair.mem0 if variant == "mem0" else pair.ours
    began = time.perf_counter()
    messages = _messages(memory, turn, k)
    searched = time.perf_counter()
    answer = chat.invoke(messages)
    ended = time.perf_counter()
    report = answer.response_metadata["inferscale"]
    wanted = k if variant == "inferscale" else 0
    if report["facts_injected"] != wanted:
        raise SelfTestError(
            f"{NAMES[variant]}: {report['facts_injected']} facts were injected, {wanted} expected: "
            f"{report['missed'][:3]}"
        )
    length = report["tokens_injected"] + report["tokens_prefilled"]
    return Took(1000 * (ended - began), 1000 * (searched - began), report["ttft_ms"], length)


def _messages(memory: Any, turn: int, k: int) -> list[tuple[str, str]]:
    """What an app sends, after its search."""
    from inferscale_mem.cli.bench.memories import OWNER, question

    asked = question(turn)
    hits = memory.search(asked, filters={"user_id": OWNER}, top_k=k)["results"]
    if len(hits) != k:
        raise SelfTestError(f"{len(hits)} facts were found, {k} asked for.")
    return [("system", SYSTEM + "\n".join(f"- {hit['memory']}" for hit in hits)), ("human", asked)]


def _floor(bench: Bench, pair: Pair, turn: int, k: int) -> Took:
    """Our prompt as text, for the second time."""
    (_, system), (_, human) = _messages(pair.ours, turn, k)
    said = [{"role": "system", "content": system}, {"role": "user", "content": human}]
    plan = pair.ours.service.plan(said)
    behind = len(plan.segments[-1].token_ids)
    tokens = plan.token_ids[(len(plan.token_ids) - behind) % bench.engine.info.block_size :]
    before = len(tokens) - behind
    for _ in range(2):
        _, (answer,) = ask_at_once(bench.engine, [as_text(tokens)], FIRST)
    cached = answer.report.tokens_cached
    if cached is not None and cached < before:
        raise SelfTestError(f"Only {cached} of {before} tokens were in the prefix cache, so it was not warm.")
    assert answer.report.ttft_ms is not None
    return Took(answer.report.ttft_ms, 0.0, answer.report.ttft_ms, len(tokens))


def ratio(times: Sequence[Times], facts: int) -> dict[str, Any]:
    """How far ours is from the floor, and from Mem0's loop."""
    mem0, ours, warm = (
        next(row.total for row in times if (row.facts, row.variant) == (facts, variant)) for variant in NAMES
    )
    over = statistics.median(mine - floor for mine, floor in zip(ours, warm, strict=True))
    return {
        "facts": facts,
        "over_warm_ms": round(over, 3),
        "mem0_over_injected": round(statistics.median(mem0) / statistics.median(ours), 3),
        "injected_over_warm": round(statistics.median(ours) / statistics.median(warm), 3),
    }


def _cells(times: Times) -> list[str]:
    row = times.as_row()
    names = ("ms_median", "search_ms_median", "ttft_ms_median", "rest_ms_median")
    return [
        str(times.facts), NAMES[times.variant], *(f"{row[name]:.1f}" for name in names),
        f"{row['prompt_tokens_median']:.0f}",
    ]  # fmt: skip


def _lines(times: Sequence[Times]) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [(row.facts, statistics.median(row.total)) for row in times if row.variant == variant]
        for variant, name in NAMES.items()
    }
