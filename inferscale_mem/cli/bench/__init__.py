"""Measure, on this machine, what injected memory gains. Each benchmark first checks that answers are right."""

from __future__ import annotations

import argparse
import importlib

from inferscale_mem.cli.arguments import Subcommand

BENCHMARKS = {
    "ttft": ("inferscale_mem.cli.bench.ttft", "time to first token: plain text, warm prefix cache and injected"),
    "throughput": (
        "inferscale_mem.cli.bench.throughput",
        "requests at once, of different users: plain text, warm prefix cache and injected",
    ),
    "kernels": ("inferscale_mem.cli.bench.kernels", "the kernels that move records, next to a copy of as many bytes"),
    "e2e": ("inferscale_mem.cli.bench.e2e", "from a query to the first token, search included, next to Mem0's loop"),
    "encode": ("inferscale_mem.cli.bench.encode", "facts encoded per second, and tokens computed for it, by policy"),
    "memory": ("inferscale_mem.cli.bench.memory", "add and search, next to Mem0's own memory"),
}
"""Benchmark -> the module with its ``add_arguments(parser)`` and ``run(args) -> int``, and what it measures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per benchmark."""
    choices = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK", parser_class=Subcommand)
    for name, (module, what) in BENCHMARKS.items():
        chosen = choices.add_parser(name, help=what, description=what)
        importlib.import_module(module).add_arguments(chosen)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    code: int = importlib.import_module(BENCHMARKS[args.benchmark][0]).run(args)
    return code
