"""``inferscale-mem bench encode``: how fast facts become records, and how much is computed for it, by policy."""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_mem.cli.bench.measuring import (
    Bench,
    add_common_arguments,
    ask_at_once,
    check_same,
    in_turns,
    opened,
    spread,
)
from inferscale_mem.cli.bench.prompts import as_text
from inferscale_mem.cli.bench.report import check_pictures, machine, progress, publish, table
from inferscale_mem.config import MEGABYTE, EncodingConfig
from inferscale_mem.encoding import parse_policy
from inferscale_mem.engines.self_test import TOP
from inferscale_mem.errors import ConfigError, InputError, SelfTestError
from inferscale_mem.protocols import FactIndex
from inferscale_mem.service import MemoryService
from inferscale_mem.types import Fact, PromptPlan, Sampling, Segment

POLICIES = ("fact_chain(8, nearest)", "fact_window(8)", "header")
GOAL = "tokens computed per own token <= 1.2 with fact_chain"
EXACT = "fact_chain(8, previous)"
EXACT_FACTS = 5
HOW = (
    "facts of one owner, in batches; per batch every policy in turn, each with a recorder of its own, is given the "
    "batch and waited for, while nothing else runs; wall time, which includes looking for the context and checking "
    "what the engine did; tokens as the engine reports them. The first batch, whose facts have the fewest earlier "
    "ones, counts as the others do"
)
PICTURE = {"title": "Encoding", "x": "facts encoded before", "y": "facts per second"}


@dataclass(frozen=True)
class Work:
    """What one policy took.

    Attributes:
        policy: its name.
        batch: facts in each batch.
        per_s: facts per second, one per batch.
        own_tokens: of all facts.
        prefilled, injected: tokens that the engine computed for them, and took from records.
    """

    policy: str
    batch: int
    per_s: tuple[float, ...]
    own_tokens: int
    prefilled: int
    injected: int

    @property
    def tokens_per_own(self) -> float:
        """Tokens computed for each token stored."""
        return self.prefilled / self.own_tokens

    def as_row(self) -> dict[str, Any]:
        """As written to JSON."""
        facts = self.batch * len(self.per_s)
        return {
            "policy": self.policy,
            "facts": facts,
            **spread("facts_per_s", self.per_s),
            "tokens_per_own_token": round(self.tokens_per_own, 3),
            "own_tokens_per_fact": round(self.own_tokens / facts, 2),
            "prefilled_per_fact": round(self.prefilled / facts, 2),
            "injected_per_fact": round(self.injected / facts, 2),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench encode``."""
    parser.add_argument("--facts", type=int, default=200, help="facts encoded under each policy (200)")
    parser.add_argument("--batch", type=int, default=20, help="facts in a batch (20)")
    parser.add_argument(
        "--policies", type=_policies, default=POLICIES, help=f"separated by semicolons ({'; '.join(POLICIES)})"
    )
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    if args.batch < 1 or args.facts < args.batch or args.facts % args.batch:
        raise InputError("--facts must be a whole number of batches, 1 or more.")
    if args.json:
        check_pictures()
    from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
    from inferscale_mem.cli.bench import memories

    logging.getLogger("mem0").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)
    with opened(args, record_bytes=1024 * MEGABYTE) as bench:
        embedder = LocalEmbedder()
        vectors = memories.embeddings(embedder, args.facts)
        with memories.indexed(vectors, embedder, bench.signer) as index:
            check_chain(bench, index)
            works = measure(bench, index, args.policies, args.batch)
        meta = machine(bench.engine, how=HOW, goal=GOAL)
    ratios = [_ratio(work, works[0]) for work in works]
    heads = ("policy", "facts/s", "own tokens", "computed", "from records", "computed / own", "facts/s / first policy")
    print(table(heads, [_cells(work, ratio) for work, ratio in zip(works, ratios, strict=True)]))
    publish(args.json, [work.as_row() for work in works], ratios, meta, _lines(works), PICTURE)
    return 0


def check_chain(bench: Bench, index: FactIndex) -> None:
    """Answers first: facts encoded one on top of the other, served in that order, must give what plain prefill gives.

    Raises:
        SelfTestError: they do not, or were not encoded or injected.
    """
    facts = index.facts()[:EXACT_FACTS]
    service = _service(bench, index, EXACT)
    try:
        _encode(service, facts)
        header = service.planner.default_header()
        told = [service.planner.fact_segment(fact.text, service.signer.mint(fact)) for fact in facts]
        question = Segment("text", tuple(bench.engine.tokenizer.encode("What did I buy?", literal=True)))
        plan = PromptPlan((header, *told, question), facts[0].scope, index.store)
        top = Sampling(max_tokens=1, temperature=0.0, logprobs=TOP)
        (plain,), (injected,) = (ask_at_once(bench.engine, [p], top)[1] for p in (as_text(plan.token_ids), plan))
        if injected.report.facts_injected != len(facts):
            raise SelfTestError(f"Facts were encoded and not injected: {injected.report.missed[:3]}")
        check_same(bench.engine, plain, injected)
        bench.engine.drop([service.signer.mint(fact) for fact in facts])
    finally:
        service.close()


def measure(bench: Bench, index: FactIndex, policies: Sequence[str], batch: int) -> list[Work]:
    """Encode all facts of the index, under each policy.

    Raises:
        SelfTestError: a fact was not encoded, or a chain found nothing to stand on.
    """
    facts = index.facts()
    services = [_service(bench, index, policy) for policy in policies]
    rates: list[list[float]] = [[] for _ in policies]
    try:
        for start in range(0, len(facts), batch):
            progress(f"encoding facts: {start} of {len(facts)}, under each of {len(policies)} policies")
            some = facts[start : start + batch]
            for service, found in in_turns(tuple(zip(services, rates, strict=True)), start // batch):
                found.append(batch / _encode(service, some))
        works = [_work(service, batch, found, facts) for service, found in zip(services, rates, strict=True)]
    finally:
        for service in services:
            service.close()
    return works


def _service(bench: Bench, index: FactIndex, policy: str) -> MemoryService:
    return MemoryService(bench.engine, index, bench.signer, EncodingConfig(policy))


def _encode(service: MemoryService, facts: Sequence[Fact]) -> float:
    """Seconds until all have a record."""
    done = service.recorder.counters["encoded"]
    began = time.perf_counter()
    service.add(facts)
    service.wait()
    seconds = time.perf_counter() - began
    made = service.recorder.counters["encoded"] - done
    if made != len(facts):
        why = ", ".join(sorted(set(service.recorder.failures.values()))) or "the engine makes no records"
        raise SelfTestError(f"{made} of {len(facts)} facts were encoded: {why}")
    return seconds


def _work(service: MemoryService, batch: int, rates: Sequence[float], facts: Sequence[Fact]) -> Work:
    counters = service.recorder.counters
    own = sum(len(service.planner.fact_tokens(fact.text)) for fact in facts)
    policy = parse_policy(service.config.policy)
    injected = counters["tokens_injected"]
    headers = len(facts) * len(service.planner.default_header().token_ids)
    if policy.kind == "fact_chain" and len(facts) > 1 and injected <= headers:
        raise SelfTestError(f"Under {policy.name}, no fact was encoded on top of earlier facts' records.")
    return Work(policy.name, batch, tuple(rates), own, counters["tokens_prefilled"], injected)


def _policies(text: str) -> tuple[str, ...]:
    parts = [part for part in re.split(r"\s*;\s*", text.strip()) if part]
    try:
        names = tuple(dict.fromkeys(parse_policy(part).name for part in parts))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not names:
        raise argparse.ArgumentTypeError("no policy given")
    return names


def _ratio(work: Work, first: Work) -> dict[str, Any]:
    rates = [statistics.median(one.per_s) for one in (work, first)]
    return {
        "policy": work.policy,
        "tokens_per_own_token": round(work.tokens_per_own, 3),
        "facts_per_s_over_first": round(rates[0] / rates[1], 3),
    }


def _cells(work: Work, ratio: dict[str, Any]) -> list[str]:
    row = work.as_row()
    tokens = (f"{row[name]:.1f}" for name in ("own_tokens_per_fact", "prefilled_per_fact", "injected_per_fact"))
    shares = (f"{ratio[name]:.2f}" for name in ("tokens_per_own_token", "facts_per_s_over_first"))
    return [work.policy, f"{row['facts_per_s_median']:.1f}", *tokens, *shares]


def _lines(works: Sequence[Work]) -> dict[str, list[tuple[float, float]]]:
    return {work.policy: [(n * work.batch, rate) for n, rate in enumerate(work.per_s)] for work in works}
