"""Measure, on data with known answers, how near answers from injected memories come to those from plain text."""

from __future__ import annotations

import argparse

from inferscale_mem.cli.arguments import Subcommand
from inferscale_mem.cli.eval import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per data set; there is one."""
    choices = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET", parser_class=Subcommand)
    text = "questions about long conversations (LoCoMo); its file is not part of this package"
    command.add_arguments(choices.add_parser("locomo", help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the chosen evaluation."""
    return command.run(args)
