"""One person's conversation with the model: recalling, answering, remembering, measuring. Prints nothing."""

from __future__ import annotations

import dataclasses
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.adapters.langchain.messages import to_template
from inferscale_mem.cli.chat.statements import statements
from inferscale_mem.errors import InputError
from inferscale_mem.protocols import Engine
from inferscale_mem.types import Fact, PromptPlan, Sampling, Scope, Segment

HEADING = "Facts about the user:"
INSTRUCTION = "Answer in one short sentence, using these facts."
"""Behind the facts, where it helps the packaged small model most; docs/decisions/0008-chat.md has the numbers."""
UNAIDED = "Answer in one short sentence."
"""Where nothing is remembered."""

TEXT_RUNS = 3

_LOOK_S = 0.2


@dataclass(frozen=True)
class Turn:
    """One line and its answer.

    Attributes:
        question: what the person said.
        answer: what the model said.
        report: ``response_metadata["inferscale"]``.
        prompt: the messages that were sent.
    """

    question: str
    answer: str
    report: dict[str, Any]
    prompt: tuple[BaseMessage, ...]


@dataclass(frozen=True)
class Comparison:
    """What one answer's first token took, and what it takes with the same prompt as plain text.

    Attributes:
        injected_ms: of the answer as it was given.
        text_ms: of the plain request, the median of ``TEXT_RUNS``.
        text_tokens: length of the plain request's prompt.
        idle: whether nothing was being encoded meanwhile.
    """

    injected_ms: float
    text_ms: float
    text_tokens: int
    idle: bool

    @property
    def ratio(self) -> float:
        """How many times as long plain text takes."""
        return self.text_ms / self.injected_ms


class ChatSession:
    """Conversation of one user over an open memory.

    Args:
        memory: an InferScaleMemory; the caller closes it.
        user: whose facts are read and written.
        top_k: at most so many facts are recalled for a line.
        history: earlier turns sent along.
        infer: let the model extract facts, instead of keeping statements as they were said.
        max_tokens: length of an answer.
    """

    def __init__(
        self, memory: Any, user: str, *, top_k: int = 20, history: int = 0, infer: bool = False, max_tokens: int = 96
    ) -> None:
        self._memory = memory
        self._scope = Scope(user_id=user)
        self._user = user
        self._top_k = top_k
        self._infer = infer
        self._turns: deque[Turn] = deque(maxlen=history)
        self._chat = ChatInferScale(memory=memory, temperature=0.0, max_tokens=max_tokens, user_id=user)

    def start(self) -> None:
        """Wait until the engine has started; the first use would do so too.

        Raises:
            ChatTemplateError: nobody can chat with this model.
        """
        self._memory.service.planner.default_header()

    def ask(self, line: str, show: Callable[[str], None]) -> Turn:
        """Answer a line with what is remembered; ``show`` gets the text as it comes."""
        prompt = [self._system(line), *self._past(), HumanMessage(line)]
        whole = None
        for piece in self._chat.stream(prompt):
            show(str(piece.content))
            whole = piece if whole is None else whole + piece
        assert whole is not None, "a stream has a last chunk"
        turn = Turn(line, str(whole.content).strip(), whole.response_metadata["inferscale"], tuple(prompt))
        self._turns.append(turn)
        return turn

    def remember(self, line: str) -> list[str]:
        """Keep what a line says about the speaker; the texts that are new."""
        if self._infer:
            return self._add([{"role": "user", "content": line}], infer=True)
        return [text for sentence in statements(line) for text in self.keep(sentence)]

    def keep(self, text: str) -> list[str]:
        """Keep a text as it is, unless it is known word for word; the texts that are new."""
        if any(fact.text.casefold() == text.casefold() for fact in self.facts()):
            return []
        return self._add(text, infer=False)

    def facts(self) -> list[Fact]:
        """All that is remembered about this user, oldest first."""
        return list(self._memory.service.index.facts(self._scope))

    def forget(self, number: int) -> str:
        """Delete the fact at this place of ``facts()``, counted from 1; its text.

        Raises:
            InputError: there is no such number.
        """
        facts = self.facts()
        if not 1 <= number <= len(facts):
            raise InputError(f"There is no fact {number}; /facts lists them.")
        fact = facts[number - 1]
        self._memory.delete(fact.id)
        return fact.text

    def forget_all(self) -> None:
        """Delete all that is remembered about this user."""
        self._memory.delete_all(user_id=self._user)

    @property
    def pending(self) -> int:
        """This user's facts without a record, except those whose encoding failed."""
        service = self._memory.service
        handles = [service.signer.mint(fact) for fact in self.facts()]
        missing = [h for h in handles if not service.recorder.is_ready(service.planner.record_id(h))]
        return sum(service.recorder.failure(handle) is None for handle in missing)

    def wait(self, seconds: float) -> bool:
        """Wait until this user's facts are encoded, at most so long; whether all of them are."""
        recorder = self._memory.service.recorder
        end = time.monotonic() + seconds
        while self.pending and recorder.pending and time.monotonic() < end:
            recorder.wait(_LOOK_S)
        return not self.pending and not self.failures

    @property
    def failures(self) -> dict[str, str]:
        """Texts of this user's facts that have no record because encoding them failed, and why."""
        service = self._memory.service
        found = {fact.text: service.recorder.failure(service.signer.mint(fact)) for fact in self.facts()}
        return {text: reason for text, reason in found.items() if reason}

    def compare(self, turn: Turn, timeout: float = 120.0) -> Comparison:
        """Measure what the first token of a turn would have taken with its memories as plain text.

        The same prompt goes to the engine once more, without records. Its facts are computed, as in an app whose
        memories change with each request; the system text in front of them comes from the prefix cache, as far as
        whole blocks of it fit, since such an app sends it each time: it is sent alone before. A few tokens at its end
        are exchanged, so that no earlier comparison of the same prompt can be found in that cache; the number of tokens
        stays. Encoding in the background is awaited first, so that it does not slow the request.
        """
        injected = turn.report["ttft_ms"]
        service = self._memory.service
        idle = service.wait(timeout)
        plan = service.plan(to_template(turn.prompt), (), self._scope)
        header = next((s.token_ids for s in plan.segments if s.kind == "header"), ())
        if header:
            self._time(header)
        spent = []
        for _ in range(TEXT_RUNS):
            unseen = _unlike_before(plan, service.engine.tokenizer.encode(secrets.token_hex(8), literal=True))
            spent.append(self._time(unseen))
        return Comparison(injected, statistics.median(spent), len(plan.token_ids), idle)

    def _time(self, token_ids: tuple[int, ...]) -> float:
        plan = PromptPlan((Segment("text", token_ids),))
        engine: Engine = self._memory.service.engine
        report = [chunk.report for chunk in engine.generate(plan, Sampling(max_tokens=1, temperature=0.0))][-1]
        assert report is not None and report.ttft_ms is not None, "an answer has a first token"
        return report.ttft_ms

    def _system(self, line: str) -> SystemMessage:
        hits = self._memory.search(line, filters={"user_id": self._user}, top_k=self._top_k, threshold=0.0)["results"]
        if not hits:
            return SystemMessage(UNAIDED)
        return SystemMessage("\n".join([HEADING, *(f"- {hit['memory']}" for hit in hits), INSTRUCTION]))

    def _past(self) -> list[BaseMessage]:
        return [message for turn in self._turns for message in (HumanMessage(turn.question), AIMessage(turn.answer))]

    def _add(self, content: Any, *, infer: bool) -> list[str]:
        added = self._memory.add(content, user_id=self._user, infer=infer)["results"]
        return [str(item["memory"]) for item in added if item.get("event", "ADD") == "ADD"]


def _unlike_before(plan: PromptPlan, unique: list[int]) -> tuple[int, ...]:
    """The plan's tokens, with the last ones of its header (or its first ones) replaced by ``unique`` ones."""
    tokens = plan.token_ids
    header = next((len(s.token_ids) for s in plan.segments if s.kind == "header"), 0)
    count = min(len(unique), 4, len(tokens) - 1)
    start = max(0, header - count)
    return tuple([*tokens[:start], *unique[:count], *tokens[start + count :]])


def as_json(turn: Turn) -> dict[str, Any]:
    """A turn in plain JSON types, without its prompt."""
    return {field.name: getattr(turn, field.name) for field in dataclasses.fields(turn) if field.name != "prompt"}
