"""``inferscale-mem eval locomo``: its options, and what happens in which order."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import re
import secrets
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale_mem.cli.arguments import add_json
from inferscale_mem.cli.bench.report import check_pictures, machine, progress
from inferscale_mem.cli.eval.judge import Judge, judge_all
from inferscale_mem.cli.eval.locomo import CATEGORIES, DATES, Conversation, read, spread
from inferscale_mem.cli.eval.log import Log
from inferscale_mem.config import RECORD_DTYPES, EncodingConfig, InferScaleConfig, is_http_url
from inferscale_mem.encoding import parse_policy
from inferscale_mem.engines import open_engine
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.handles import load_key

if TYPE_CHECKING:  # loads Mem0
    from inferscale_mem.cli.eval.asking import Asked
    from inferscale_mem.protocols import Engine

INSTRUCTION = "Answer in a few words."
MOST_GB = 1e6
PACE_S = 10.0
"""Seconds between lines of progress where they do not overwrite each other."""

HOW = (
    "each condition is compared, question by question, with plain prefill of the same facts in the same order (most "
    "similar last): dll is the right answer's log-likelihood less that of plain prefill, nats a token; kl_mean and "
    "kl_first KL(plain || condition) in nats, mean over the right answer's tokens and at its first; top1 the share of "
    "these tokens at which both find the same one most likely; f1, bleu1 of greedy answers (0 to 1); recall the share "
    "of evidence turns among the facts served; closed_kl, closed_ll the share (0 to 1) of the gap between policy alone "
    "and plain prefill; standard errors clustered by conversation (closed_kl_se: jackknife); answer_ms, ttft_ms: wall"
)

_SECRET = re.compile(r"key|token(?!s|iz)|secret|password|credential|authorization", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``eval locomo``."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="LoCoMo's file, e.g. locomo10.json")
    add("--policy", action="append", metavar="P", help="encoding policy; may be given again (default: the product's)")
    add("--text-tail", type=numbers, default=(0,), metavar="N,…", help="leave so many facts to prefill (0)")
    add("--k", type=numbers, default=(10, 50), metavar="N,…", help="facts searched for (10,50)")
    add("--questions", type=int, metavar="N", help="of each conversation, evenly spread (all)")
    add("--conversations", metavar="ID,…", help="only these (all)")
    add("--categories", type=numbers, default=tuple(CATEGORIES), metavar="N,…", help="of questions (1,2,3,4)")
    add("--dates", choices=DATES, default="behind", help="where a fact's text gets its session's date (behind)")
    add("--facts", choices=("observations", "extracted"), default="observations", help="the data set's, or by the LLM")
    add("--mem0-config", type=Path, metavar="FILE", help="Mem0's configuration, JSON: llm and embedder")
    add("--instruction", default=INSTRUCTION, help=f"stands behind each question ({INSTRUCTION!r})")
    add("--max-tokens", type=int, default=32, help="of a free answer; 0 makes none (32)")
    add(
        "--again",
        type=int,
        default=5,
        metavar="N",
        help="questions of each conversation asked twice, as noise floor (5)",
    )
    add("--model", help="Hugging Face id or local path (default: as configured)")
    add("--engine", choices=("vllm", "transformers"), help="what runs the model (default: as configured)")
    add("--dtype", default="auto", help="of weights and KV (auto)")
    add(
        "--record-dtype", choices=RECORD_DTYPES, default="auto", help="how records are stored: as the KV cache, or less"
    )
    add("--preamble", metavar="FILE", help="encode facts behind this one, of `inferscale-mem train`")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer (the model's)")
    add("--record-gb", type=float, default=4.0, help="budget for records of one conversation, all policies (4)")
    add("--at-once", type=int, default=1, metavar="N", help="questions under way at a time; times mean less then (1)")
    add("--judge-url", metavar="URL", help="OpenAI-compatible endpoint, with /v1, that judges answers")
    add("--judge-model", metavar="NAME", help="the judge's model")
    add("--judge-key-file", type=Path, metavar="FILE", help="holds the judge's API key")
    add_json(parser, "write rows and machine here, a picture and the log beside it; goes on from that log")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print a table, write what was asked for."""
    judge = _judge(args)
    conversations, digest = read(args.data)
    chosen = choose(conversations, args)
    if args.json:
        check_pictures()
    asked, settings = _asked(args), _settings(args)
    logging.getLogger("mem0").setLevel(logging.ERROR)  # what is not installed is told in meta
    warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)
    from inferscale_mem.cli.eval import report
    from inferscale_mem.cli.eval.asking import run as run_all

    progress("starting the engine")
    engine = open_engine(settings, load_key(settings))
    try:
        meta = _meta(engine, args, asked, digest)
        with Log(args.json.with_suffix(".jsonl") if args.json else None, _made_with(meta)) as log:
            run_all(chosen, asked, engine, settings, log, Paced())
            written = report.write(args.json, log, meta) if args.json else []  # before a judge can fail
            if judge is not None:
                meta["judge"] = judge_all(judge, chosen, log, Paced())
                written = report.write(args.json, log, meta) if args.json else []
            print(report.shown(log))
            for file in written:
                print(f"wrote {file}")
    finally:
        engine.close()
    return 0


def choose(conversations: Sequence[Conversation], args: argparse.Namespace) -> list[Conversation]:
    """The conversations and questions that were asked for.

    Raises:
        InputError: an id that the file does not have, or no question is left.
    """
    wanted = args.conversations.split(",") if args.conversations else [one.id for one in conversations]
    if unknown := sorted(set(wanted) - {one.id for one in conversations}):
        raise InputError(f"--conversations: {unknown[0]!r} is not in the file; it has {[c.id for c in conversations]}.")
    chosen = []
    for one in conversations:
        questions = [question for question in one.questions if question.category in args.categories]
        if args.questions is not None:
            if args.questions < 1:
                raise InputError(f"--questions={args.questions} must be 1 or more.")
            questions = spread(questions, args.questions)
        if one.id in wanted and questions:
            chosen.append(replace(one, questions=tuple(questions)))
    if not chosen:
        raise InputError("No question is left to ask; check --questions, --categories and --conversations.")
    return chosen


class Paced:
    """Progress on stderr, not more often than a reader wants it."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= (0.2 if sys.stderr.isatty() else PACE_S):
            self._last = now
            progress(text)


def _asked(args: argparse.Namespace) -> Asked:
    from inferscale_mem.cli.eval.asking import Asked
    from inferscale_mem.cli.eval.memories import ALONE, Source

    if min(args.k) < 1 or min(args.text_tail) < 0 or args.max_tokens < 0 or args.again < 0 or args.at_once < 1:
        raise InputError("--k and --at-once are 1 or more; --text-tail, --max-tokens and --again 0 or more.")
    if max(args.text_tail) >= min(args.k):
        raise InputError(f"--text-tail {max(args.text_tail)} would leave nothing to inject of --k {min(args.k)} facts.")
    given = [parse_policy(policy).name for policy in args.policy or [EncodingConfig().policy]]
    mem0 = _json(args.mem0_config) if args.mem0_config else None
    return Asked(
        policies=tuple(dict.fromkeys([ALONE, *given])),
        text_tails=args.text_tail,
        ks=args.k,
        source=Source(args.dates, args.facts == "extracted", mem0),
        instruction=args.instruction.strip(),
        max_tokens=args.max_tokens,
        again=args.again,
        at_once=args.at_once,
    )


def _settings(args: argparse.Namespace) -> InferScaleConfig:
    if not 0 < args.record_gb < MOST_GB:
        raise InputError(f"--record-gb={args.record_gb} must be more than 0 and less than {MOST_GB:.0e}.")
    # A key of its own: evaluating leaves nothing in the user's home but the converted model.
    engine = {
        "dtype": args.dtype,
        "record_dtype": args.record_dtype,
        "preamble": args.preamble,
        "record_bytes": int(args.record_gb * 1e9),
        "max_model_len": args.max_model_len,
    }
    if args.engine:
        engine["kind"] = args.engine
    return InferScaleConfig.from_env({"model": args.model, "handle_key": secrets.token_hex(32), "engine": engine})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--mem0-config {path} cannot be read: {error}.") from error
    if not isinstance(found, dict) or set(found) & {"vector_store", "history_db_path", "inferscale"}:
        raise ConfigError(f"--mem0-config {path} must be an object without vector_store, history_db_path, inferscale.")
    return found


def _meta(engine: Engine, args: argparse.Namespace, asked: Asked, digest: str) -> dict[str, Any]:
    return machine(
        engine,
        how=HOW,
        max_model_len=engine.info.max_model_len,
        preamble=engine.info.preamble.record if engine.info.preamble else None,
        fingerprint=engine.info.fingerprint,
        data=args.data.name,
        data_sha256=digest,
        facts=args.facts,
        dates=args.dates,
        mem0_config=without_secrets(asked.source.mem0 or {}),
        instruction=asked.instruction,
        max_tokens=asked.max_tokens,
        at_once=asked.at_once,
        mem0=importlib.metadata.version("mem0ai"),
        keyword_search=importlib.util.find_spec("fastembed") is not None,
        entities=importlib.util.find_spec("spacy") is not None,
    )


def _made_with(meta: dict[str, Any]) -> dict[str, Any]:
    """What must not change between lines of one log."""
    # The telling first.
    engine = ("model", "device", "engine", "dtype", "record_dtype", "max_model_len", "fingerprint")
    data = ("data_sha256", "facts", "dates", "mem0_config", "instruction", "max_tokens", "at_once")
    return {name: meta[name] for name in (*engine, *data, "mem0", "keyword_search", "entities")}


def without_secrets(given: Any) -> Any:
    """A configuration as it may be published: keys, tokens and passwords are known by the names of their settings."""
    if isinstance(given, dict):
        return {
            name: "(left out)"
            if _SECRET.search(str(name)) and isinstance(value, str | list)
            else without_secrets(value)
            for name, value in given.items()
        }
    return [without_secrets(one) for one in given] if isinstance(given, list) else given


def _judge(args: argparse.Namespace) -> Judge | None:
    if not args.judge_url and not args.judge_model:
        return None
    if not args.judge_url or not args.judge_model or args.max_tokens < 1:
        raise InputError("A judge needs --judge-url, --judge-model, and answers to judge (--max-tokens).")
    try:
        key = args.judge_key_file.read_text(encoding="utf-8").strip() if args.judge_key_file else ""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"--judge-key-file {args.judge_key_file} cannot be read: {why}.") from error
    if not (key.isascii() and (key.isprintable() or not key)) or " " in key:
        raise InputError(f"--judge-key-file {args.judge_key_file} must hold a key and nothing else, on one line.")
    if not is_http_url(args.judge_url):
        raise InputError(f"--judge-url {args.judge_url!r} must be like http://host:8000/v1, or with https://.")
    return Judge(args.judge_url, args.judge_model, key)


def numbers(text: str) -> tuple[int, ...]:
    """A list of numbers, as an option takes it."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 10,50") from error
