"""``inferscale-mem train``: its options, and what happens in which order."""

from __future__ import annotations

import argparse
import logging
import secrets
import statistics
import time
import warnings
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inferscale_mem.cli.bench.report import progress
from inferscale_mem.cli.eval.command import INSTRUCTION, Paced, choose, numbers
from inferscale_mem.cli.eval.locomo import CATEGORIES, read
from inferscale_mem.config import EncodingConfig, EngineConfig, InferScaleConfig
from inferscale_mem.encoding import parse_policy
from inferscale_mem.errors import InputError, MissingDependencyError
from inferscale_mem.handles import load_key
from inferscale_mem.models import resolve_model

if TYPE_CHECKING:  # loads torch
    from inferscale_mem.cli.train.training import Step, Trainer

RECORD_BYTES = 4_000_000_000
SHOWN = 20
"""Steps that a mean of the losses is taken over."""
SAVED_EVERY = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``train``."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="facts, questions and answers, of LoCoMo's form")
    add("--out", type=Path, required=True, metavar="FILE", help="the preamble, e.g. preamble.safetensors")
    add("--policy", default=EncodingConfig().policy, help=f"what facts are encoded behind ({EncodingConfig().policy})")
    add("--k", type=numbers, default=(10, 50), metavar="N,…", help="facts served, one of these in each step (10,50)")
    add("--steps", type=int, default=800, help="of one question each (800)")
    add("--rate", type=float, default=5e-3, help="Adam's learning rate at its highest (0.005)")
    add("--questions", type=int, metavar="N", help="of each conversation, evenly spread (all)")
    add("--conversations", metavar="ID,…", help="only these, e.g. to evaluate on the others (all)")
    add("--categories", type=numbers, default=tuple(CATEGORIES), metavar="N,…", help="of questions (1,2,3,4)")
    add("--instruction", default=INSTRUCTION, help=f"stands behind each question ({INSTRUCTION!r})")
    add("--model", help="Hugging Face id or local path (default: as configured)")
    add("--dtype", default="auto", help="of weights and KV (auto)")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer (the model's)")


def run(args: argparse.Namespace) -> int:
    """Train, and write the file."""
    policy = parse_policy(args.policy)
    if policy.kind != "fact_chain":
        raise InputError(f"--policy {policy.name}: a preamble is trained for fact_chain(m, how).")
    if min(args.k) < 1 or args.steps < 1 or not 0 < args.rate < 1:
        raise InputError("--k and --steps are 1 or more, --rate between 0 and 1.")
    if not args.out.absolute().parent.is_dir() or args.out.is_dir():
        raise InputError(f"--out {args.out} must be a file in a folder that is there.")
    conversations = choose(read(args.data)[0], args)
    logging.getLogger("mem0").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)
    engine_config = EngineConfig(
        kind="transformers", dtype=args.dtype, max_model_len=args.max_model_len, record_bytes=RECORD_BYTES
    )
    found = InferScaleConfig.from_env({"model": args.model, "handle_key": secrets.token_hex(32)})
    settings = replace(found, engine=engine_config)
    progress("loading the model")
    try:
        from inferscale_mem.cli.train.lessons import read_lessons
        from inferscale_mem.cli.train.training import Trainer
        from inferscale_mem.engines.transformers_embedded import TransformersEngine
    except ModuleNotFoundError as error:
        raise MissingDependencyError(str(error.name), "cpu") from error
    engine = TransformersEngine(resolve_model(settings), engine_config, load_key(settings))
    try:
        paced = Paced()
        lessons = read_lessons(conversations, policy, args.k, engine, settings, args.instruction.strip(), paced)
        trainer = Trainer(engine.model, lessons, args.rate)
        trainer.prepare(lambda number: paced(f"encoding fact {number + 1} of {len(lessons.facts)}"))
        trainer.train(args.steps, Shown(trainer, args.out, args.steps, lessons.header, lessons.tokenizer))
    finally:
        engine.close()
    print(f"wrote {args.out}; evaluate it with `inferscale-mem eval locomo --preamble {args.out}` on other facts")
    return 0


class Shown:
    """Tells how far training is, and saves now and then, so that a run that is stopped is worth something.

    Args:
        trainer: that trains.
        out: the file.
        steps: how many there will be.
        header, tokenizer: see ``preamble.save``.
    """

    def __init__(self, trainer: Trainer, out: Path, steps: int, header: tuple[int, ...], tokenizer: str) -> None:
        self._trainer, self._out, self._steps = trainer, out, steps
        self._header, self._tokenizer = header, tokenizer
        self._losses: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SHOWN))
        self._began = time.monotonic()

    def __call__(self, number: int, step: Step) -> None:
        """After step ``number``, counted from 0."""
        done = number + 1
        self._losses[step.k].append(step.loss)
        if done % SHOWN == 0 or done == self._steps:
            means = ", ".join(f"k={k} {statistics.mean(some):.4f}" for k, some in sorted(self._losses.items()))
            left = (time.monotonic() - self._began) / done * (self._steps - done) / 60
            progress(f"step {done} of {self._steps}: mean loss of the last {SHOWN}: {means}; {left:.0f} min left")
        if done % SAVED_EVERY == 0 or done == self._steps:
            self._save()

    def _save(self) -> None:
        from inferscale_mem.kv.preamble import save

        new = self._out.with_name(f"{self._out.name}.new")
        save(new, self._header, self._tokenizer, self._trainer.preamble)
        new.replace(self._out)
