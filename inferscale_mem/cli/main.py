"""``inferscale-mem``: finds the subcommand, runs it, and turns errors into one line and an exit code.

Exit codes: 0 all well, 1 it failed while running, 2 something given was wrong, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import inferscale_mem
from inferscale_mem.errors import ConfigError, InferScaleError, InputError

COMMANDS = {
    "doctor": ("inferscale_mem.cli.doctor", "check that this machine has what is needed"),
    "chat": ("inferscale_mem.cli.chat", "talk to a model that remembers you"),
    "serve": ("inferscale_mem.cli.serve", "serve a model with memory, for any OpenAI client"),
    "bench": ("inferscale_mem.cli.bench", "measure what injected memory gains on this machine"),
    "train": ("inferscale_mem.cli.train", "bring injected answers nearer to those of plain text, for this model"),
    "eval": ("inferscale_mem.cli.eval", "measure how near injected answers come to those of plain text"),
}
"""Subcommand -> the module with its ``add_arguments(parser)`` and ``run(args) -> int``, and what it does. Modules are
imported only when their subcommand is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        given = parser.parse_args(argv)
        return _run(given.command, given.arguments)
    except InferScaleError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InputError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="inferscale-mem",
        description="Long-term memory for self-hosted LLM apps, kept as KV state inside the engine.",
        epilog=f"commands:\n{listed}\n\ninferscale-mem COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"inferscale-mem {inferscale_mem.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the command takes")
    return parser


def _run(command: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(COMMANDS[command][0])
    described = (module.__doc__ or "").replace("``", "")  # reStructuredText is for readers of the source
    parser = argparse.ArgumentParser(prog=f"inferscale-mem {command}", description=described)
    module.add_arguments(parser)
    passed_on: list[str] = []
    if hasattr(module, "split"):  # the rest is for the program it starts
        arguments, passed_on = module.split(arguments)
    args = parser.parse_args(arguments, argparse.Namespace(passed_on=passed_on))
    code: int = module.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
