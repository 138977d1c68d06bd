"""The conversation that ``chat`` plays where nobody is there to type: tell, ask, restart, ask again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from inferscale_mem.cli.chat.session import ChatSession, Comparison, Turn, as_json
from inferscale_mem.cli.chat.terminal import Terminal, describe, describe_comparison

USER = "scripted-conversation"
"""Owner of the made-up facts; they are removed at the end."""

ENCODING_S = 600.0
"""Longest wait for the records."""

TOLD = (
    "My name is Nora.",
    "My dog is called Biscuit.",
    "I am allergic to walnuts.",
    "I work as a nurse in Oslo.",
    "My favourite colour is green.",
    "I play the cello on Sundays.",
    "My sister lives in Madrid.",
    "I drive an old red Volvo.",
    "I learned to swim when I was thirty.",
    "My birthday is on 12 March.",
    "I drink my coffee black.",
    "I am reading a book about whales.",
    "I grow tomatoes on my balcony.",
    "My grandmother came from Iceland.",
    "I go running before breakfast.",
)

ASKED = (
    ("What is the name of my dog?", "Biscuit"),
    ("What am I allergic to?", "walnut"),
    ("When is my birthday?", "March"),
)


@dataclass(frozen=True)
class Asked:
    """One question of the play and how it went.

    Attributes:
        turn: question, answer, report.
        expected: must stand in the answer.
        restarted: whether it was asked after the restart.
        comparison: with plain text, if measured.
    """

    turn: Turn
    expected: str
    restarted: bool
    comparison: Comparison | None = None

    @property
    def trouble(self) -> str:
        """What is wrong with it; "" if nothing."""
        if self.turn.report["facts_injected"] < 1:
            return "no fact was injected"
        if self.expected.casefold() not in self.turn.answer.casefold():
            return f"the answer does not say {self.expected!r}"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain = None if self.comparison is None else dataclasses.asdict(self.comparison)
        return {
            **as_json(self.turn),
            "expected": self.expected,
            "restarted": self.restarted,
            "ok": not self.trouble,
            "comparison": plain,
        }


OpenSession = Callable[[str], AbstractContextManager[ChatSession]]
"""Opens everything for a user, and closes it at the end of the block."""


def play(open_session: OpenSession, terminal: Terminal) -> list[Asked]:
    """Tell a dozen facts, ask for three, close, open again, ask again. Leaves none of the facts behind.

    The first time, what each answer would have cost as plain text is measured too.
    """
    terminal.line("Nobody is typing, so here is a short conversation with a made-up person.")
    with open_session(USER) as session:
        session.forget_all()
        try:
            _tell(session, terminal)
            asked = _ask(session, terminal, restarted=False)
        except BaseException:
            session.forget_all()
            raise
    terminal.line("\nEverything is closed. Opening it again, in the same folder:")
    with open_session(USER) as session:
        try:
            _encode(session, terminal)
            asked += _ask(session, terminal, restarted=True)
        finally:
            session.forget_all()
    return asked


def sum_up(asked: list[Asked], terminal: Terminal) -> bool:
    """Say how it went; whether all went well."""
    failed = [item for item in asked if item.trouble]
    before = [item for item in asked if not item.restarted]
    after = [item for item in asked if item.restarted]
    for name, items in (("before the restart", before), ("after the restart", after)):
        right = sum(not item.trouble for item in items)
        terminal.line(f"{right} of {len(items)} questions answered from memory {name}.")
    if not failed and after:
        terminal.line("It still knows after a restart.")
    for item in failed:
        terminal.line(f"FAILED: {item.turn.question} {item.trouble}: {item.turn.answer!r}")
    return not failed


def _tell(session: ChatSession, terminal: Terminal) -> None:
    for text in TOLD:
        for kept in session.keep(text):
            terminal.line(f"you> {kept}")
    terminal.note(f"     remembered {len(session.facts())} facts")
    _encode(session, terminal)


def _encode(session: ChatSession, terminal: Terminal) -> None:
    with terminal.busy("encoding the facts", lambda: f"({session.pending} left)"):
        complete = session.wait(ENCODING_S)
    if not complete:
        terminal.line(f"{session.pending + len(session.failures)} facts are not encoded and are served as text.")
        for text, reason in session.failures.items():
            terminal.line(f"  {text} {reason}")


def _ask(session: ChatSession, terminal: Terminal, *, restarted: bool) -> list[Asked]:
    asked = []
    for question, expected in ASKED:
        terminal.line(f"\nyou> {question}")
        terminal.write("bot> ")
        turn = session.ask(question, terminal.write)
        terminal.line()
        terminal.note(f"     {describe(turn.report)}")
        comparison = None if restarted else session.compare(turn)
        if comparison is not None:
            terminal.note(f"     {describe_comparison(comparison)}")
        asked.append(Asked(turn, expected, restarted, comparison))
    return asked
