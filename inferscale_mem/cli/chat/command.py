"""``inferscale-mem chat``: talk to a model that remembers you across runs.

With a terminal it is a conversation, with lines from a pipe it answers each, and with nothing to read it plays a short
scripted conversation, which checks what it shows and says so in its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from inferscale_mem.cli.chat.terminal import Terminal, describe, describe_comparison
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import InferScaleError, InputError

if TYPE_CHECKING:
    from inferscale_mem.cli.chat.session import ChatSession

HELP = """\
/facts          what I know about you
/forget N       forget fact N of that list
/remember TEXT  keep this text, whatever it is
/compare        from now on, also measure what memories as plain text would cost (again: stop it)
/help           this
/quit           end; so do Ctrl-D and Ctrl-C

I keep your statements about yourself, as you say them: sentences that are no questions and in which "I", "we", "my" or
"our" stands. With --infer the model picks the facts instead."""


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
        help="earlier turns sent along (default: 4; 0 with the packaged small model, which then repeats itself)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scripted conversation's figures here")
    parser.add_argument("--verbose", action="store_true", help="show the engine's own log")


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends; 0 if all went well."""
    terminal = Terminal()
    try:
        return _run(args, terminal)
    except InferScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        terminal.line("\nBye.")
        return 130


def _run(args: argparse.Namespace, terminal: Terminal) -> int:
    if args.top_k < 1 or args.max_tokens < 1:
        raise InputError("--top-k and --max-tokens must be 1 or more.")
    if args.verbose:
        logging.basicConfig(level=logging.INFO)
    else:
        _hush()
    config = InferScaleConfig.from_env(
        {"model": args.model, "home": args.home, "engine": {"kind": args.engine} if args.engine else None}
    )
    if args.history is None:
        args.history = 4 if config.model else 0
    if sys.stdin.isatty():
        return _converse(args, config, terminal, _typed())
    first = sys.stdin.readline()
    if first:
        return _converse(args, config, terminal, _piped(first, terminal))
    return _play(args, config, terminal)


def _hush() -> None:
    """Keep other libraries' logs and progress bars out of the conversation, here and in the engine's processes."""
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TQDM_DISABLE", "1"),
    ):
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("inferscale_mem").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def _session(
    args: argparse.Namespace, config: InferScaleConfig, terminal: Terminal, user: str
) -> Iterator[ChatSession]:
    """Everything open for one user, and closed at the end."""
    with contextlib.ExitStack() as stack:
        with terminal.busy("starting the engine"):
            # Imported here, not above: they are slow to load, and read the environment that _hush sets.
            from inferscale_mem.adapters.mem0 import InferScaleMemory
            from inferscale_mem.cli.chat.session import ChatSession

            memory = InferScaleMemory(inferscale=config)
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


def _play(args: argparse.Namespace, config: InferScaleConfig, terminal: Terminal) -> int:
    from inferscale_mem.cli.chat.script import play, sum_up

    asked = play(lambda user: _session(args, config, terminal, user), terminal, compare=args.compare)
    if args.json:
        args.json.write_text(json.dumps([item.as_json() for item in asked], indent=1) + "\n", encoding="utf-8")
    terminal.line()
    return 0 if sum_up(asked, terminal) else 1


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("you> ")
    print()


def _piped(first: str, terminal: Terminal) -> Iterator[str]:
    for line in (first, *sys.stdin):
        terminal.line(f"you> {line.rstrip()}")
        yield line


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "me"


class _Conversation:
    """Reads lines, answers them, obeys commands."""

    def __init__(self, session: ChatSession, terminal: Terminal, compare: bool) -> None:
        self._session = session
        self._terminal = terminal
        self._compare = compare

    def take(self, lines: Iterable[str]) -> None:
        """Answer the lines until they end or one says /quit."""
        for line in lines:
            line = line.strip()
            if line in ("/quit", "/exit"):
                return
            try:
                self._obey(line) if line.startswith("/") else self._answer(line)
            except InputError as error:
                self._terminal.line(str(error))

    def _answer(self, line: str) -> None:
        if not line:
            return
        terminal, session = self._terminal, self._session
        terminal.write(terminal.bold("bot> "))
        turn = session.ask(line, terminal.write)
        terminal.line()
        terminal.note(f"     {describe(turn.report)}")
        if self._compare and turn.report["facts_injected"]:
            terminal.note(f"     {describe_comparison(session.compare(turn))}")
        for text in session.remember(line):
            terminal.note(f"     remembered: {text}")

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        terminal, session = self._terminal, self._session
        if command == "/facts":
            self._list()
        elif command == "/forget" and rest.strip().isdecimal():
            terminal.line(f"Forgotten: {session.forget(int(rest))}")
        elif command == "/remember" and rest.strip():
            terminal.line("\n".join(f"Remembered: {text}" for text in session.keep(rest.strip())) or "I knew that.")
        elif command == "/compare":
            self._compare = not self._compare
            terminal.line(f"Comparing with plain text is {'on' if self._compare else 'off'}.")
        else:
            terminal.line(HELP)

    def _list(self) -> None:
        facts = self._session.facts()
        for number, fact in enumerate(facts, 1):
            self._terminal.line(f"{number:3}  {fact.text}")
        if not facts:
            self._terminal.line("Nothing yet.")


def _converse(args: argparse.Namespace, config: InferScaleConfig, terminal: Terminal, lines: Iterable[str]) -> int:
    user = args.user or _login()
    with _session(args, config, terminal, user) as session:
        known = len(session.facts())
        facts = f"{known} fact{'' if known == 1 else 's'}"
        terminal.line(f"Hello {user}. I know {facts} about you. /help lists what I can do.")
        try:
            _Conversation(session, terminal, args.compare).take(lines)
        except KeyboardInterrupt:
            terminal.line()  # The engine's processes got the same signal, so there is no going on.
    return 0
