"""``inferscale-mem bench memory``: add and search, Mem0's own memory and ours side by side in one run."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale_mem.cli.bench.measuring import add_common_arguments, counts, in_turns, opened, spread
from inferscale_mem.cli.bench.report import check_pictures, machine, progress, publish, table
from inferscale_mem.config import MEGABYTE
from inferscale_mem.errors import InputError, SelfTestError
from inferscale_mem.protocols import Engine

if TYPE_CHECKING:  # loads Mem0, which the other benchmarks need not wait for
    from inferscale_mem.cli.bench.memories import Pair

SEARCH, RAW, INFER = "search", "add infer=False", "add infer=True"
GOALS = {SEARCH: "1.0 at 1,000 facts, 0.2 at 20,000", RAW: "1.1", INFER: "1.1"}
RECORD_BYTES = 16 * MEGABYTE
"""Little, so that the records of facts stored beforehand are made before anything is timed."""

ROUNDING = 1e-5
"""Two scores this near count as equal: Mem0's store computes them in another precision."""

HOW = (
    "all facts are of one owner; per operation, after one uncounted round, Mem0's Memory and InferScaleMemory take "
    "turns in going first; same embedder, same extraction LLM (it replies at once with one fact), copies of one "
    "embedded store on disk; search gives text there and handles here, top_k=20; nothing is being encoded when a call "
    "begins"
)
PICTURE = {"title": "Memory operations", "x": "facts stored", "y": "milliseconds (median)"}


@dataclass(frozen=True)
class Times:
    """Times of one operation, in milliseconds.

    Attributes:
        facts: stored before.
        operation: what was timed.
        memory: "mem0" or "inferscale".
        ms: one per round.
    """

    facts: int
    operation: str
    memory: str
    ms: tuple[float, ...]

    def as_row(self, meta: dict[str, Any]) -> dict[str, Any]:
        """As written to JSON."""
        return {
            "facts": self.facts,
            "operation": self.operation,
            "memory": self.memory,
            **spread("ms", self.ms),
            **{
                name: meta[name] for name in ("device", "model", "embedder", "engine", "mem0", "inferscale_mem", "time")
            },
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench memory``."""
    parser.add_argument("--facts", type=counts(1), default=counts(1)("1000,20000"), help="facts stored (1000,20000)")
    parser.add_argument("--repeat", type=int, default=21, help="searches measured (21)")
    parser.add_argument("--repeat-add", type=int, default=41, help="adds of each kind measured (41)")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if min(args.repeat, args.repeat_add) < 1:
        raise InputError("--repeat and --repeat-add must be 1 or more.")
    if args.json:
        check_pictures()
    from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
    from inferscale_mem.cli.bench import memories

    logging.getLogger("mem0").setLevel(logging.ERROR)  # what is not installed is told in meta
    warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)
    with opened(args, record_bytes=RECORD_BYTES) as bench:
        embedder = LocalEmbedder()
        vectors = memories.embeddings(embedder, max(args.facts))
        times: list[Times] = []
        for facts in args.facts:
            with memories.opened(vectors[:facts], embedder, bench.engine, bench.settings) as pair:
                times += measure(pair, facts, args.repeat, args.repeat_add)
        meta = meta_of(bench.engine, str(embedder.config.model), how=HOW, record_bytes=RECORD_BYTES)
    ratios = [ratio(times, facts, operation) for facts in args.facts for operation in GOALS]
    heads = ("facts", "operation", "mem0 ms", "inferscale ms", "inferscale / mem0", "goal")
    print(table(heads, [[str(cell) for cell in row.values()] for row in ratios]))
    publish(args.json, [row.as_row(meta) for row in times], ratios, meta, _lines(times), PICTURE)
    return 0


def measure(pair: Pair, facts: int, repeat: int, repeat_add: int) -> list[Times]:
    """Times of all operations with so many facts stored.

    Raises:
        SelfTestError: the two memories do not find, or did not store, the same.
    """
    from inferscale_mem.cli.bench.memories import question

    check_searches(pair, facts)
    found = []
    for operation, rounds in ((SEARCH, repeat), (RAW, repeat_add), (INFER, repeat_add)):
        spent: dict[str, list[float]] = {"mem0": [], "inferscale": []}
        for turn in range(rounds + 1):
            progress(f"{facts} facts, {operation}: round {turn + 1} of {rounds + 1}")
            for name in in_turns(("mem0", "inferscale"), turn):
                memory = pair.mem0 if name == "mem0" else pair.ours
                call = _search(memory, question(turn)) if operation == SEARCH else _add(pair, memory, operation, turn)
                _until_idle(pair)
                began = time.perf_counter()
                call()
                if turn:
                    spent[name].append(1000 * (time.perf_counter() - began))
        found += [Times(facts, operation, name, tuple(ms)) for name, ms in spent.items()]
    check_searches(pair, facts)
    check_stored(pair, facts + 2 * (repeat_add + 1))
    return found


def check_searches(pair: Pair, facts: int) -> None:
    """Raise SelfTestError unless both memories find the same facts, with the same scores, in the same order."""
    from inferscale_mem.cli.bench.memories import OWNER, fact_text, question

    for query in (*map(question, range(5)), fact_text(0), fact_text(facts - 1)):
        asked: dict[str, Any] = {"filters": {"user_id": OWNER}, "top_k": 20}
        theirs = pair.mem0.search(query, **asked)["results"]
        ours = pair.ours.search(query, **asked)["results"]
        texts = [hit["memory"] for hit in pair.ours.resolve(ours)]
        apart = [abs(one["score"] - two["score"]) for one, two in zip(theirs, ours, strict=False)]
        if len(theirs) != len(ours) or not theirs or max(apart) > ROUNDING:
            raise SelfTestError(f"Mem0 and InferScale-Mem score {query!r} differently, so times would mean nothing.")
        known = {hit["memory"]: hit["score"] for hit in theirs}
        last = theirs[-1]["score"]
        for text, hit in zip(texts, ours, strict=True):
            # Facts that tie with the last one may be others.
            if abs(known.get(text, last) - hit["score"]) > ROUNDING:
                raise SelfTestError(f"Mem0 and InferScale-Mem find different facts for {query!r}.")


def check_stored(pair: Pair, expected: int) -> None:
    """Raise SelfTestError unless both stores hold so many facts, and the same texts."""
    stored = []
    for memory in (pair.mem0, pair.ours):
        rows, _ = memory.vector_store.list(top_k=expected + 1)
        stored.append(sorted(row.payload["data"] for row in rows))
    if stored[0] != stored[1] or len(stored[0]) != expected:
        raise SelfTestError(f"{len(stored[0])} and {len(stored[1])} facts are stored, {expected} were added.")


def ratio(times: Sequence[Times], facts: int, operation: str) -> dict[str, Any]:
    """Medians of both, ours as a part of Mem0's, and the most it should be."""
    theirs, ours = (
        statistics.median(row.ms)
        for name in ("mem0", "inferscale")
        for row in times
        if (row.facts, row.operation, row.memory) == (facts, operation, name)
    )
    return {
        "facts": facts,
        "operation": operation,
        "mem0_ms": round(theirs, 2),
        "inferscale_ms": round(ours, 2),
        "ratio": round(ours / theirs, 3),
        "goal": GOALS[operation],
    }


def _until_idle(pair: Pair) -> None:
    """Wait until nothing is being encoded."""
    recorder = pair.ours.service.recorder
    while left := recorder.pending:
        recorder.wait(1.0)
        if recorder.pending:
            progress(f"records of earlier facts are being made: {left} to go")


def _search(memory: Any, query: str) -> Callable[[], Any]:
    from inferscale_mem.cli.bench.memories import OWNER

    return lambda: memory.search(query, filters={"user_id": OWNER}, top_k=20)


def _add(pair: Pair, memory: Any, operation: str, turn: int) -> Callable[[], Any]:
    from inferscale_mem.cli.bench.memories import OWNER, fact_text

    infer = operation == INFER
    # Numbers that no stored fact has.
    pair.llm.fact = text = fact_text(10_000_000 + 2 * turn + infer)
    return lambda: memory.add(text, user_id=OWNER, infer=infer)


def meta_of(engine: Engine, embedder: str, **more: Any) -> dict[str, Any]:
    """Of measurements that Mem0 takes part in; ``embedder`` names its model."""
    versions = {name: importlib.metadata.version(name) for name in ("qdrant-client", "numpy")}
    return machine(
        engine,
        mem0=importlib.metadata.version("mem0ai"),
        embedder="/".join(Path(embedder).parts[-2:]),  # packages call the folder "model"
        keyword_search=importlib.util.find_spec("fastembed") is not None,
        entities=importlib.util.find_spec("spacy") is not None,
        **versions,
        **more,
    )


def _lines(times: Sequence[Times]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in times:
        lines.setdefault(f"{row.operation}, {row.memory}", []).append((row.facts, statistics.median(row.ms)))
    return lines
