"""What benchmarks share: an engine of their own, requests that are checked, and what is said of many times."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from inferscale_mem.cli.arguments import add_json
from inferscale_mem.cli.bench.prompts import Workload
from inferscale_mem.cli.bench.report import progress
from inferscale_mem.config import AUTO, RECORD_DTYPES, InferScaleConfig
from inferscale_mem.engines import open_engine
from inferscale_mem.engines.self_test import TOP, divergence, max_kl
from inferscale_mem.errors import SelfTestError
from inferscale_mem.handles import HandleSigner, load_key
from inferscale_mem.protocols import Engine
from inferscale_mem.types import Chunk, InjectReport, PromptPlan, Sampling

T = TypeVar("T")
Mode = Literal["text", "warm", "injected"]
MODES: tuple[Mode, ...] = ("text", "warm", "injected")
NAMES: Mapping[Mode, str] = {
    "text": "plain text",
    "warm": "warm prefix cache",
    "injected": "injected",
}
FIRST = Sampling(max_tokens=1, temperature=0.0)
STORE = "bench"
WRITTEN = "write rows, ratios and machine here, and pictures beside it"


def counts(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads an argument like "5,10,50", each number once; for argparse."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 5,10,50") from error
        if min(numbers) < least:
            raise argparse.ArgumentTypeError(f"numbers must be {least} or more")
        return tuple(dict.fromkeys(numbers))

    return read


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--record-dtype`` and ``--json``."""
    parser.add_argument("--model", help="Hugging Face id or local path of the chat model (default: as configured)")
    parser.add_argument(
        "--record-dtype", choices=RECORD_DTYPES, default=AUTO, help="how records are stored: as the KV cache, or less"
    )
    add_json(parser, WRITTEN)


@dataclass(frozen=True)
class Bench:
    """An engine, and what signs its handles."""

    engine: Engine
    settings: InferScaleConfig
    signer: HandleSigner


@contextlib.contextmanager
def opened(args: argparse.Namespace, **engine: Any) -> Iterator[Bench]:
    """An engine with a key of its own, so that measuring leaves nothing in the user's home but the converted model.

    Args:
        args: what ``add_common_arguments`` asks for.
        engine: further settings, as ``EngineConfig``.
    """
    engine["record_dtype"] = args.record_dtype
    settings = InferScaleConfig.from_env({"model": args.model, "handle_key": secrets.token_hex(32), "engine": engine})
    key = load_key(settings)
    progress("starting the engine")
    held = open_engine(settings, key)
    try:
        yield Bench(held, settings, HandleSigner(key, STORE))
    finally:
        held.close()


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and most of a row's values, as written to JSON; ``n`` is how many."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    found = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {**{f"{name}_{what}": round(value, 3) for what, value in found.items()}, "n": len(values)}


def in_turns(names: Sequence[T], turn: int) -> Sequence[T]:
    """Who goes first changes from turn to turn."""
    return names if turn % 2 else names[::-1]


@dataclass(frozen=True)
class Answer:
    """A whole answer: how many tokens it has, log-probs of the first (if asked for), the report."""

    tokens: int
    logprobs: Mapping[int, float]
    report: InjectReport


async def ask(engine: Engine, plan: PromptPlan, sampling: Sampling) -> Answer:
    """One answer, to its end."""
    chunks: AsyncIterator[Chunk] = engine.agenerate(plan, sampling)
    tokens, first, report = 0, None, None
    async for chunk in chunks:
        tokens += len(chunk.token_ids)
        first = first or (chunk.logprobs[0] if chunk.logprobs else None)
        report = chunk.report or report
    assert report is not None
    return Answer(tokens, first or {}, report)


def ask_at_once(engine: Engine, plans: Sequence[PromptPlan], sampling: Sampling) -> tuple[float, list[Answer]]:
    """All answers, asked for at one moment; and the seconds until the last one was complete."""

    async def wave() -> tuple[float, list[Answer]]:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(engine, plan, sampling) for plan in plans))
        return time.perf_counter() - began, answers

    return asyncio.run(wave())


def check_served(mode: Mode, report: InjectReport, workload: Workload) -> None:
    """Whether a request was served as its mode says.

    Raises:
        SelfTestError: something was computed that should not have been, or the other way round.
    """
    length = len(workload.injected.token_ids)
    before = length - len(workload.question.token_ids)
    injected = (before, len(workload.facts)) if mode == "injected" else (0, 0)
    if (report.tokens_injected, report.facts_injected) != injected:
        raise SelfTestError(
            f"{NAMES[mode]}: {report.tokens_injected} tokens and {report.facts_injected} facts were injected, "
            f"{injected[0]} and {injected[1]} expected: {report.missed[:3]}"
        )
    cached = report.tokens_cached
    if cached is None or mode == "injected":
        return
    if mode == "text" and cached:
        raise SelfTestError(f"{cached} tokens of a text that was never sent before were in the prefix cache.")
    if mode == "warm" and cached < before:
        raise SelfTestError(
            f"Only {cached} of {before} tokens were in the prefix cache, so it was not warm; give the engine a larger "
            "paged cache (--kv-cache-mib, where there is one), or ask for fewer requests at once."
        )


def check_exact(engine: Engine, *workloads: Workload) -> None:
    """Answers first: records of the exact prefix must give what plain prefill gives, for all workloads at once.

    Raises:
        SelfTestError: they do not, or were not injected.
    """
    top = Sampling(max_tokens=1, temperature=0.0, logprobs=TOP)
    _, plain = ask_at_once(engine, [workload.text for workload in workloads], top)
    _, injected = ask_at_once(engine, [workload.injected for workload in workloads], top)
    for workload, one, other in zip(workloads, plain, injected, strict=True):
        check_served("injected", other.report, workload)
        check_same(engine, one, other)


def check_same(engine: Engine, plain: Answer, injected: Answer) -> None:
    """Raise SelfTestError unless the first tokens of two answers are equally likely."""
    kl = divergence(plain.logprobs, injected.logprobs)
    if not kl <= max_kl(engine.info):
        raise SelfTestError(f"Injected and plain answers differ (KL {kl:.3g} nats), so times would mean nothing.")
