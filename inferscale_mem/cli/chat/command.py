"""``inferscale-mem chat``: talk to a model that remembers you across runs.

With a terminal it is a conversation, with lines from a pipe it answers each, and with nothing to read it plays a short
scripted conversation, which checks what it shows and says so in its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import io
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inferscale_mem.cli.arguments import add_json
from inferscale_mem.cli.chat.conversation import Conversation
from inferscale_mem.cli.chat.quiet import Quiet, Stage, own_stream
from inferscale_mem.cli.chat.terminal import Terminal
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError, EngineError, InferScaleError, InputError
from inferscale_mem.models import is_packaged

if TYPE_CHECKING:
    from inferscale_mem.cli.chat.session import ChatSession

PIPE_WAIT_S = 30.0
"""Longest wait for the records of what a line from a pipe has told: lines come faster than anybody types."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--user", help="whose memories these are (default: your login name)")
    parser.add_argument("--model", help="Hugging Face id or folder of the chat model")
    parser.add_argument("--home", type=Path, help="folder for facts and converted models (default: ~/.inferscale)")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="what runs the model (default: vllm)")
    parser.add_argument("--compare", action="store_true", help="also measure each answer with memories as plain text")
    parser.add_argument("--infer", action="store_true", help="let the model extract the facts from what you say")
    parser.add_argument("--top-k", type=int, default=20, help="facts recalled for a line, at most (default: 20)")
    parser.add_argument("--max-tokens", type=int, default=96, help="length of an answer, at most (default: 96)")
    parser.add_argument(
        "--history",
        type=int,
        help="earlier turns sent along (default: 4; 0 with the packaged small model, which repeats them)",
    )
    add_json(parser, "write the scripted conversation's figures here")
    parser.add_argument("--verbose", action="store_true", help="show the engine's own log")


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends; 0 if all went well."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    terminal = Terminal(own_stream(sys.stdout, 1))
    try:
        config = _config(args)
        if args.verbose:
            logging.basicConfig(level=logging.INFO)
            return _run(_Setting(args, config, terminal, contextlib.nullcontext))
        log = config.home / "chat.log"
        try:
            with Quiet(log) as quiet:
                return _run(_Setting(args, config, terminal, quiet.starting))
        except EngineError:
            print(f"What the engine itself said is in {log}.", file=sys.stderr)
            raise
    except InferScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InputError) else 1
    except KeyboardInterrupt:
        terminal.line("\nBye.")
        return 130


def _config(args: argparse.Namespace) -> InferScaleConfig:
    if args.top_k < 1 or args.max_tokens < 1:
        raise InputError("--top-k and --max-tokens must be 1 or more.")
    config = InferScaleConfig.from_env(
        {"model": args.model, "home": args.home, "engine": {"kind": args.engine} if args.engine else None}
    )
    if args.history is None:
        args.history = 0 if is_packaged(config) else 4
    if args.history < 0:
        raise InputError("--history must be 0 or more.")
    return config


@dataclass(frozen=True)
class _Setting:
    """What a conversation takes place in; ``starting`` goes around starting the engine."""

    args: argparse.Namespace
    config: InferScaleConfig
    terminal: Terminal
    starting: Callable[[], AbstractContextManager[None]]

    @contextlib.contextmanager
    def session(self, user: str) -> Iterator[ChatSession]:
        """Everything open for one user, and closed at the end."""
        args = self.args
        with contextlib.ExitStack() as stack:
            stage = stack.enter_context(Stage("loading libraries"))
            with self.terminal.busy("starting the engine", stage), self.starting():
                # Imported here, not above: they are slow to load, and nobody needs them for --help.
                from inferscale_mem.adapters.mem0 import InferScaleMemory
                from inferscale_mem.cli.chat.session import ChatSession

                memory = InferScaleMemory(inferscale=self.config)
                stack.callback(memory.close)
                session = ChatSession(
                    memory,
                    user,
                    top_k=args.top_k,
                    history=args.history,
                    infer=args.infer,
                    max_tokens=args.max_tokens,
                )
                session.start()
            yield session


def _run(setting: _Setting) -> int:
    if sys.stdin is not None and sys.stdin.isatty():
        return _converse(setting, _typed(), wait_s=0.0)
    first = sys.stdin.readline() if sys.stdin is not None else ""
    if first:
        return _converse(setting, _piped(first, setting.terminal), wait_s=PIPE_WAIT_S)
    return _play(setting)


def _play(setting: _Setting) -> int:
    from inferscale_mem.cli.chat.script import play, sum_up

    args, terminal = setting.args, setting.terminal
    asked = play(setting.session, terminal)
    if args.json:
        args.json.write_text(json.dumps([item.as_json() for item in asked], indent=1) + "\n", encoding="utf-8")
    terminal.line()
    return 0 if sum_up(asked, terminal) else 1


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    with contextlib.suppress(EOFError):
        while True:
            yield input("you> ")
    print()


def _piped(first: str, terminal: Terminal) -> Iterator[str]:
    for line in itertools.chain((first,), sys.stdin):
        terminal.line(f"you> {line.rstrip()}")
        yield line


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "me"


def _converse(setting: _Setting, lines: Iterable[str], *, wait_s: float) -> int:
    args, terminal = setting.args, setting.terminal
    user = args.user or _login()
    with setting.session(user) as session:
        known = len(session.facts())
        facts = f"{known} fact{'' if known == 1 else 's'}"
        terminal.line(f"Hello {user}. I know {facts} about you. /help lists what I can do.")
        try:
            Conversation(session, terminal, compare=args.compare, wait_s=wait_s).take(lines)
        except KeyboardInterrupt:
            # The engine's processes got the same signal: there is no going on, and what failed by it is no news.
            logging.disable(logging.WARNING)
            terminal.line()
    return 0
