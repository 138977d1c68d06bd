"""What arguments of several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BESIDE = (".jsonl", ".png", ".svg")
"""Endings of what may be written beside ``--json FILE``: a log, pictures."""


class Subcommand(argparse.ArgumentParser):
    """A parser for ``add_subparsers(parser_class=…)`` that shows its own usage where an argument is not known; argparse
    would show that of the command above it."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See ArgumentParser; nothing is left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """``--json FILE``; a file that cannot be written is refused before the command does anything.

    Args:
        parser: gets the option; its value is a Path, None if it is not given.
        what: is written there, for --help.
    """
    parser.add_argument("--json", type=_writable, metavar="FILE", help=what)


def _writable(text: str) -> Path:
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}; make it first, or name another file")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text} must end in .json: what is written beside it ends otherwise")
    for beside in (path, *(path.with_suffix(ending) for ending in BESIDE)):
        if not os.access(beside if beside.exists() else folder, os.W_OK):
            raise argparse.ArgumentTypeError(f"{beside} cannot be written; name another file")
    return path
