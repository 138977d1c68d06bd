"""LoCoMo's file as conversations of facts, dialog turns and questions. Reads only; knows no model.

The file is a list of conversations, each with sessions of dialog turns, with ``observation`` (statements about a
speaker, each with the turns it was taken from), and with questions. Questions of category 5 have no answer by design,
and are left out, as in published scores; so are those that lack answer or question by mistake.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale_mem.errors import InputError

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
DATES = ("behind", "before", "off")
"""Where a fact's text gets its session's date."""

_TURN = re.compile(r"D:?(\d+):(\d+)")
_SESSION = re.compile(r"session_([1-9]\d*)")


@dataclass(frozen=True)
class Turn:
    """Something said.

    Attributes:
        id: as evidence names it, "D1:3": session 1, turn 3.
        speaker: who said it.
        text: what.
        date: of the session, "8 May 2023".
    """

    id: str
    speaker: str
    text: str
    date: str


@dataclass(frozen=True)
class Observation:
    """A fact that the data set's authors took from a conversation.

    Attributes:
        text: the statement.
        speaker: whom it is about.
        date: of the session it was taken from, "8 May 2023".
        evidence: ids of the turns it was taken from.
    """

    text: str
    speaker: str
    date: str
    evidence: tuple[str, ...]

    def dated(self, how: str) -> str:
        """The text with its session's date: "… (8 May 2023)" behind, "8 May 2023: …" before, or off."""
        if how == "off":
            return self.text
        return f"{self.text} ({self.date})" if how == "behind" else f"{self.date}: {self.text}"


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        number: its place in the file's list, which does not change with what is left out.
        text: the question.
        answer: the right answer, as text.
        category: a key of CATEGORIES.
        evidence: ids of the turns that hold the answer.
    """

    number: int
    text: str
    answer: str
    category: int
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """One conversation; everything oldest first.

    Attributes:
        id: its name in the file.
        turns: what was said, all sessions.
        facts: what is to be remembered.
        questions: those that have an answer.
    """

    id: str
    turns: tuple[Turn, ...]
    facts: tuple[Observation, ...]
    questions: tuple[Question, ...]


def read(path: Path) -> tuple[list[Conversation], str]:
    """The conversations of a file, and the SHA-256 of its bytes.

    Raises:
        InputError: no such file, or not of LoCoMo's form.
    """
    try:
        data = path.read_bytes()
        listed = json.loads(data)
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--data {path} is not JSON: {error}.") from error
    if not isinstance(listed, list) or not listed:
        raise InputError(f"--data {path} is not LoCoMo's: it must be a list of conversations.")
    conversations = []
    for number, one in enumerate(listed):
        try:
            conversations.append(_conversation(one, f"conversation-{number}"))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise InputError(
                f"--data {path}: conversation {number} is not of LoCoMo's form ({type(error).__name__}: {error})."
            ) from error
    names = [one.id for one in conversations]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--data {path}: two conversations have the sample_id {twice!r}.")
    return conversations, hashlib.sha256(data).hexdigest()


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """So many of them, evenly spread: questions of a category stand together."""
    count = min(count, len(questions))
    return [questions[(2 * place + 1) * len(questions) // (2 * count)] for place in range(count)]


def _conversation(given: Mapping[str, Any], name: str) -> Conversation:
    said = given["conversation"]
    found = (m for key in said if (m := _SESSION.fullmatch(key)) and isinstance(said[key], list))
    sessions = sorted(int(m[1]) for m in found)
    turns = [turn for session in sessions for turn in _turns(said, session)]
    facts = [fact for session in sessions for fact in _facts(given["observation"], session, _date(said, session))]
    if not facts:
        raise ValueError("no observations, so nothing to remember")
    name = name if given.get("sample_id") is None else str(given["sample_id"])
    return Conversation(name, tuple(turns), tuple(facts), tuple(_questions(given["qa"])))


def _turns(said: Mapping[str, Any], session: int) -> Iterator[Turn]:
    for turn in said[f"session_{session}"]:
        yield Turn(_text(turn, "dia_id"), _text(turn, "speaker"), _text(turn, "text"), _date(said, session))


def _facts(observation: Mapping[str, Any], session: int, date: str) -> list[Observation]:
    """A session's facts in the order of the turns they were taken from; the file lists them by speaker."""
    found = []
    for speaker, listed in observation.get(f"session_{session}_observation", {}).items():
        for one in listed:
            if not isinstance(one, list):  # two characters would be taken for a pair
                raise ValueError(f"an observation of session {session} is no list of a text and its turns")
            text, evidence = one
            found.append(Observation(text.strip(), speaker, date, _evidence(evidence)))
    return sorted(found, key=lambda fact: min((int(turn.split(":")[1]) for turn in fact.evidence), default=0))


def _questions(listed: list[Mapping[str, Any]]) -> Iterator[Question]:
    for number, one in enumerate(listed):
        given, written = one.get("answer"), str(one["category"])
        if not written.isdecimal():
            raise ValueError(f"the category of question {number} is no whole number")
        if isinstance(given, dict | list):
            raise ValueError(f"the answer of question {number} is no text")
        answer = "" if given is None else str(given).strip()
        question = _text(one, "question").strip()
        (question + answer).encode()  # lone surrogates are no text
        if (category := int(written)) in CATEGORIES and answer and question:
            yield Question(number, question, answer, category, _evidence(one.get("evidence", [])))


def _text(given: Mapping[str, Any], name: str) -> str:
    if not isinstance(given[name], str):
        raise ValueError(f"{name} is {given[name]!r}, no text")
    return str(given[name])


def _evidence(given: str | list[str]) -> tuple[str, ...]:
    """Turn ids in a text or a list of texts, spelled one way: files also have "D8:6; D9:17", "D:11:26", "D30:05"."""
    text = given if isinstance(given, str) else " ".join(given)
    return tuple(dict.fromkeys(f"D{int(session)}:{int(turn)}" for session, turn in _TURN.findall(text)))


def _date(said: Mapping[str, Any], session: int) -> str:
    """ "8 May 2023" of "1:56 pm on 8 May, 2023"."""
    return str(said[f"session_{session}_date_time"]).rpartition(" on ")[2].replace(",", "").strip()
