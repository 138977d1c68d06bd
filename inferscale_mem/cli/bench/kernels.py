"""``inferscale-mem bench kernels``: the kernels that move records, next to a copy of as many bytes, in one run."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inferscale_mem.cli.arguments import add_json
from inferscale_mem.cli.bench.measuring import WRITTEN, counts, spread
from inferscale_mem.cli.bench.prompts import FACT_TOKENS
from inferscale_mem.cli.bench.report import check_pictures, progress, publish, system, table
from inferscale_mem.errors import ConfigError, InputError, SelfTestError

if TYPE_CHECKING:  # loads torch
    from inferscale_mem.cli.bench.kernel_problem import Case

SHAPES = {"cpu": (30, 3, 64), "cuda": (32, 8, 128)}
"""Layers, KV heads and head size: SmolLM2-135M's, and those of Llama-3.1-8B."""
EMBEDDINGS = 100_000
GOALS = {"cpu": ">= 0.4", "cuda": ">= 0.8"}
HOW = (
    "records of {facts} facts of 22 tokens lie scattered over a slab four times as large, and go to blocks scattered "
    "over a cache four times as large; each kernel is checked against its reference first. Rounds of every kernel and "
    "of a copy of as many bytes on as many threads, interleaved, after one uncounted round; before each measurement "
    "twice the last-level cache is {swept}. Medians; rates count bytes read and written"
)
PICTURE = {"title": "Kernels next to a copy", "x": "tokens moved", "y": "GB/s read and written (median)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench kernels``."""
    parser.add_argument("--facts", type=counts(1), default=counts(1)("5,50"), help="facts of 22 tokens (5,50)")
    parser.add_argument("--layers", type=int, help="of the model (30; on a GPU 32)")
    parser.add_argument("--heads", type=int, help="KV heads (3; on a GPU 8)")
    parser.add_argument("--head-size", type=int, help="channels per head (64; on a GPU 128)")
    parser.add_argument("--repeat", type=int, default=25, help="measurements of each (25)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add_json(parser, WRITTEN)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write what was asked for."""
    import torch

    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else args.device.replace("auto", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no GPU that torch can use here; --device cpu measures the CPU's kernel.")
    for name, size in zip(("layers", "heads", "head_size"), SHAPES[device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, size)
    if min(args.layers, args.heads, args.head_size, args.repeat) < 1 or args.head_size % 16:
        raise InputError("All numbers must be 1 or more, and --head-size a multiple of 16.")
    if args.json:
        check_pictures()
    cases, times = _on_gpu(args) if device == "cuda" else _on_cpu(args)
    rows = [row for case, pair in zip(cases, times, strict=True) for row in as_rows(case, *pair)]
    ratios = [_ratio(case, *pair) for case, pair in zip(cases, times, strict=True)]
    heads = ("kernel", "threads", "tokens", "ulp", "MB", "ms", "copy ms", "GB/s", "of a copy")
    print(table(heads, [_cells(case, ratio) for case, ratio in zip(cases, ratios, strict=True)]))
    swept = "overwritten" if device == "cuda" else "read"
    how = HOW.format(facts=", ".join(map(str, args.facts)), swept=swept)
    shape = {"layers": args.layers, "kv_heads": args.heads, "head_size": args.head_size}
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    meta = {**system(name), "how": how, **shape, "threads": torch.get_num_threads(), "goal": GOALS[device]}
    publish(args.json, rows, ratios, meta, _lines(cases, times), PICTURE)
    return 0


Times = Sequence[tuple[Sequence[float], Sequence[float]]]


def _on_cpu(args: argparse.Namespace) -> tuple[list[Case], Times]:
    from inferscale_mem.cli.bench import cpu_kernels

    return checked(found := cpu_kernels.cases(args)), cpu_kernels.timed(found, args.repeat)


def _on_gpu(args: argparse.Namespace) -> tuple[list[Case], Times]:
    import torch

    from inferscale_mem.cli.bench import gpu_kernels

    found: list[Case] = []
    for facts in args.facts:
        progress(f"checking kernels, {facts} facts")
        shape = (args.layers, args.heads, args.head_size, facts * FACT_TOKENS)
        found += gpu_kernels.cases(*shape, EMBEDDINGS, torch.device("cuda"))
    return checked(found), gpu_kernels.timed(found, args.repeat)


def checked(cases: list[Case]) -> list[Case]:
    """The cases, all of which agree with their references.

    Raises:
        SelfTestError: one does not.
    """
    from inferscale_mem.cli.bench.kernel_problem import WORST_ULPS

    wrong = [f"{case.name} ({case.ulps:g} ulp)" for case in cases if not case.ulps <= WORST_ULPS]
    if wrong:
        raise SelfTestError(f"Kernels differ from their references, so times would mean nothing: {', '.join(wrong)}")
    return cases


def as_rows(case: Case, ours: Sequence[float], copied: Sequence[float]) -> list[dict[str, Any]]:
    """As written to JSON."""
    about = {"kernel": case.name, "threads": case.threads, "tokens": case.tokens, "bytes": case.moved}
    return [
        {**about, "what": what, **spread("ms", ms), "gb_per_s_median": round(_rate(case, ms), 3)}
        for what, ms in (("kernel", ours), ("copy", copied))
    ]


def _rate(case: Case, ms: Sequence[float]) -> float:
    """GB/s."""
    return case.moved / statistics.median(ms) / 1e6


def _ratio(case: Case, ours: Sequence[float], copied: Sequence[float]) -> dict[str, Any]:
    middles = [statistics.median(ms) for ms in (ours, copied)]
    return {
        "kernel": case.name,
        "threads": case.threads,
        "tokens": case.tokens,
        "ms": round(middles[0], 3),
        "copy_ms": round(middles[1], 3),
        "copy_over_kernel": round(middles[1] / middles[0], 3),
        "ulps": case.ulps,
    }


def _cells(case: Case, ratio: dict[str, Any]) -> list[str]:
    threads = "" if case.threads is None else str(case.threads)
    numbers = (f"{ratio['ms']:.2f}", f"{ratio['copy_ms']:.2f}", f"{case.moved / ratio['ms'] / 1e6:.1f}")
    share = f"{ratio['copy_over_kernel']:.0%}"
    return [case.name, threads, str(case.tokens), f"{case.ulps:g}", f"{case.moved / 1e6:.1f}", *numbers, share]


def _lines(cases: Sequence[Case], times: Times) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, (ours, copied) in zip(cases, times, strict=True):
        on = "" if case.threads is None else f", threads: {case.threads}"
        lines.setdefault(case.name + on, []).append((case.tokens, _rate(case, ours)))
        if "topk" not in case.name:
            copies = lines.setdefault(f"copy{on}", [])
            if case.tokens not in dict(copies):
                copies.append((case.tokens, _rate(case, copied)))
    return lines
