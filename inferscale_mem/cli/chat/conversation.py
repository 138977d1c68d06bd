"""Line after line: what is said to the model, and what is said to the chat itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from inferscale_mem.cli.chat.terminal import Terminal, describe, describe_comparison
from inferscale_mem.errors import EngineError, InferScaleError

if TYPE_CHECKING:
    from inferscale_mem.cli.chat.session import ChatSession

HELP = """\
/facts          what I know about you
/forget N       forget fact N of that list
/remember TEXT  keep this text, whatever it is
/compare        from now on, also measure what memories as plain text would cost (again: stop it)
/help           this
/quit           end; so do Ctrl-D and Ctrl-C

To compare, the same prompt is sent once more without memories in KV: its facts are computed, its system text comes from
the prefix cache, as it would in an app that sends other memories with each request.

I keep your statements about yourself, as you say them: sentences that are no questions and in which "I", "we", "my" or
"our" stands. With --infer the model picks the facts instead."""


class Conversation:
    """Takes lines, answers them, obeys commands.

    Args:
        session: answers.
        terminal: shows it.
        compare: whether to measure plain text too, to begin with.
        wait_s: longest wait, behind each line, for the records of what it has told.
    """

    def __init__(self, session: ChatSession, terminal: Terminal, *, compare: bool, wait_s: float) -> None:
        self._session = session
        self._terminal = terminal
        self._compare = compare
        self._wait_s = wait_s

    def take(self, lines: Iterable[str]) -> None:
        """Answer the lines until they end or one says /quit."""
        for line in lines:
            line = line.strip()
            if line in ("/quit", "/exit"):
                return
            try:
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._answer(line)
            except EngineError:
                raise
            except InferScaleError as error:
                self._terminal.line(str(error))

    def _answer(self, line: str) -> None:
        terminal, session = self._terminal, self._session
        terminal.write(terminal.bold("bot> "))
        turn = session.ask(line, terminal.write)
        terminal.line()
        terminal.note(f"     {describe(turn.report)}")
        if self._compare and turn.report["facts_injected"]:
            terminal.note(f"     {describe_comparison(session.compare(turn))}")
        for text in session.remember(line):
            terminal.note(f"     remembered: {text}")
        session.wait(self._wait_s)

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
            if command != "/help":
                terminal.line(f"{line} is none of these:")
            terminal.line(HELP)

    def _list(self) -> None:
        facts = self._session.facts()
        for number, fact in enumerate(facts, 1):
            self._terminal.line(f"{number:3}  {fact.text}")
        if not facts:
            self._terminal.line("Nothing yet.")
