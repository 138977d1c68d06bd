"""A language model that says whether an answer is right, behind any OpenAI-compatible endpoint.

A judge is a measuring instrument with an error of its own, so it is measured too: it also judges planted wrong answers,
the right answers of other questions of the same category. The share that it accepts is its false-accept rate.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_mem.cli.eval.locomo import Conversation, Question
from inferscale_mem.cli.eval.log import ANSWER, KEYS, PLANTED, VERDICT, Line, Log
from inferscale_mem.cli.eval.scoring import words
from inferscale_mem.errors import EngineError, InputError

TIMEOUT_S = 120.0
RETRY_AFTER_S = (1.0, 5.0, 20.0)
"""Pauses before an endpoint that is overloaded or failed is asked again."""

PROMPT = """\
Does an answer to a question about two people's lives say what the right answer says? It may be longer, or put \
differently; a date may be written in any way. It is wrong if it names another fact, or none.

Question: {question}
Right answer: {gold}
Answer to judge: {answer}

Reply with one word, RIGHT or WRONG."""

MOST_BYTES = 1_000_000
"""Of a reply."""

_FIRST = re.compile(r"\W*(right|wrong)\b(?!\s*(?:or\b|/|answer))", re.IGNORECASE)
_VERDICT = re.compile(r"\b(right|wrong)\b(?! answer)", re.IGNORECASE)
_TURNED = re.compile(
    r"(?:\b(?:not|never|neither|nor|hardly|cannot)|n['\u2019]t)\b(?:\W+\w+){0,2}\W+(?:right|wrong)\b", re.IGNORECASE
)
"""A verdict that is denied, which one cannot read off its words."""


@dataclass(frozen=True)
class Judge:
    """A model behind an endpoint.

    Attributes:
        url: up to and including "/v1".
        model: its name there.
        key: sent as bearer token; "" sends none.
    """

    url: str
    model: str
    key: str = ""

    def accepts(self, question: str, gold: str, answer: str) -> bool | None:
        """Whether the answer is right; None: what it said is no verdict. An empty answer is wrong without asking.

        Raises:
            InputError: the endpoint does not take the request.
            EngineError: it cannot be reached, or fails.
        """
        if not answer.strip():
            return False
        prompt = PROMPT.format(question=question, gold=gold, answer=answer)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": 16,
        }
        return verdict(self._ask_patiently(body))

    def _ask_patiently(self, body: Mapping[str, Any]) -> str:
        for pause in RETRY_AFTER_S:
            try:
                return self._ask(body)
            except EngineError:
                time.sleep(pause)
        return self._ask(body)

    def _ask(self, body: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        url = f"{self.url.rstrip('/')}/chat/completions"
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with _opener.open(request, timeout=TIMEOUT_S) as reply:
                status, said = reply.status, _read(reply)
            if status == 200:
                return str(json.loads(said)["choices"][0]["message"]["content"] or "")
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
            raise EngineError(f"The judge at {url} cannot be asked ({error}); check --judge-url.") from error
        kind = InputError if 300 <= status < 500 and status != 429 else EngineError
        raise kind(f"The judge at {url} answers {status}: {said[:300].decode(errors='replace')}")


class _AsItIs(urllib.request.HTTPErrorProcessor):
    """Gives back every reply: a redirect that is followed takes the key to another host."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        """See urllib."""
        return response

    https_response = http_response


_opener = urllib.request.build_opener(_AsItIs)


def _read(reply: Any) -> bytes:
    """All of a reply, within a time and a size."""
    said, until = b"", time.monotonic() + TIMEOUT_S
    while part := reply.read1(MOST_BYTES):
        said += part
        if len(said) > MOST_BYTES or time.monotonic() > until:
            raise OSError(f"the reply is longer than {MOST_BYTES} bytes or {TIMEOUT_S:.0f} seconds")
    return said


def verdict(said: str) -> bool | None:
    """Whether a reply says that the answer is right; None if it says neither, or both, or what cannot be told.

    The first word counts where it is a verdict; otherwise the only one, if it is not denied.
    """
    if first := _FIRST.match(said):
        return first[1].lower() == "right"
    found = {word.lower() for word in _VERDICT.findall(said)}
    return found == {"right"} if len(found) == 1 and not _TURNED.search(said) else None


def planted(questions: Sequence[Question]) -> Iterator[tuple[Question, str]]:
    """Questions with a wrong answer: the right one of the next question of the same category whose words differ."""
    for place, question in enumerate(questions):
        others = [*questions[place + 1 :], *questions[:place]]
        mine = set(words(question.answer))
        same = (other for other in others if other.category == question.category)
        wrong = next((o for o in same if mine and (theirs := set(words(o.answer))) and not mine & theirs), None)
        if wrong is not None:
            yield question, wrong.answer


def judge_all(
    judge: Judge, conversations: Sequence[Conversation], log: Log, say: Callable[[str], None]
) -> dict[str, Any]:
    """Verdicts on all answers in the log that have none yet, and on planted wrong ones; what the latter came to."""
    questions = {(one.id, question.number): question for one in conversations for question in one.questions}
    lines = [line for line in log.lines(ANSWER) if "answer" in line]
    verdicts = []
    for number, line in enumerate(lines):
        if (question := questions.get((line["conversation"], line["question"]))) is not None:
            say(f"judging answer {number + 1} of {len(lines)}")
            verdicts.append(_verdict(judge, question, line, VERDICT, log))
    wrong = [
        (question, {"conversation": one.id, "question": question.number, "answer": answer})
        for one in conversations
        for question, answer in planted(one.questions)
    ]
    accepted = []
    for number, (question, line) in enumerate(wrong):
        say(f"judging planted wrong answer {number + 1} of {len(wrong)}")
        accepted.append(_verdict(judge, question, line, PLANTED, log))
    known = [one for one in accepted if one is not None]
    return {
        "model": judge.model,
        "planted_wrong": len(wrong),
        "false_accept_rate": sum(known) / len(known) if known else None,
        "no_verdict": [*verdicts, *accepted].count(None),
    }


def _verdict(judge: Judge, question: Question, line: Line, kind: str, log: Log) -> bool | None:
    """What the judge said, or says now, of one answer."""
    key = {name: {**line, "judge": judge.model}[name] for name in KEYS[kind]}
    if (said := log.get(kind, *key.values())) is None:
        said = {**key, "accepted": judge.accepts(question.text, question.answer, line["answer"])}
        log.add(kind, said)
    accepted: bool | None = said["accepted"]
    return accepted
