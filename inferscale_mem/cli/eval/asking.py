"""Asks every question in every condition, and compares each with plain prefill of the same facts in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from inferscale_mem.cli.eval.locomo import Conversation, Question, spread
from inferscale_mem.cli.eval.log import ANSWER, ENCODED, Log
from inferscale_mem.cli.eval.memories import ALONE, Memories, Source, opened
from inferscale_mem.cli.eval.scoring import Scores, bleu1, compare, recall, token_f1
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError, EngineError, InputError
from inferscale_mem.prompt import DEFAULT_SYSTEM
from inferscale_mem.protocols import Engine
from inferscale_mem.service import MemoryService
from inferscale_mem.types import PromptPlan, Sampling

TEXT, AGAIN, NONE = "text", "text again", "none"
"""Plain prefill of the facts; the same once more, the noise floor; and no facts at all."""


@dataclass(frozen=True)
class Condition:
    """One way to serve the facts that were found.

    Attributes:
        policy: an encoding policy, or TEXT, AGAIN or NONE.
        text_tail: so many facts are left to prefill.
    """

    policy: str
    text_tail: int = 0

    @property
    def injected(self) -> bool:
        """Whether records are used."""
        return self.policy not in (TEXT, AGAIN, NONE)


@dataclass(frozen=True)
class Asked:
    """What an evaluation does.

    Attributes:
        policies: canonical names; ALONE among them.
        text_tails: how many facts are left to prefill; each policy but ALONE with each.
        ks: how many facts are searched for.
        source: where facts come from.
        instruction: stands behind each question.
        max_tokens: of a free answer; 0: none are made.
        again: so many questions of each conversation, evenly spread, are asked twice as plain text.
        at_once: questions under way at the same time.
    """

    policies: tuple[str, ...]
    text_tails: tuple[int, ...] = (0,)
    ks: tuple[int, ...] = (10, 50)
    source: Source = field(default_factory=Source)
    instruction: str = ""
    max_tokens: int = 32
    again: int = 5
    at_once: int = 1

    def conditions(self, twice: bool) -> list[Condition]:
        """Of a question; ``twice``: it is one of those that are asked twice as plain text."""
        plain = [Condition(TEXT), *([Condition(AGAIN)] if twice else []), Condition(NONE), Condition(ALONE)]
        others = [policy for policy in self.policies if policy != ALONE]
        return plain + [Condition(policy, tail) for policy in others for tail in self.text_tails]


class Progress:
    """How much is left, and how long that will take at the pace so far.

    Args:
        total: answers to make.
        show: shows a line.
    """

    def __init__(self, total: int, show: Callable[[str], None]) -> None:
        self._total, self._done, self._show = total, 0, show
        self._began: float | None = None

    def done(self, what: str) -> None:
        """One more answer. The first starts the clock: what was in front of it is not there again for each."""
        self._began = self._began or time.monotonic()
        self._done += 1
        self.say(what)

    def say(self, what: str) -> None:
        """Show what is being done now."""
        self._show(f"{what}; {self._done} of {self._total} answers{self._left()}")

    def _left(self) -> str:
        if self._began is None or self._done < 2:
            return ""
        seconds = (time.monotonic() - self._began) * (self._total - self._done) / (self._done - 1)
        return f", {seconds / 60:.0f} min left"


def run(
    conversations: Sequence[Conversation],
    asked: Asked,
    engine: Engine,
    settings: InferScaleConfig,
    log: Log,
    show: Callable[[str], None],
) -> None:
    """Answer what the log does not have yet.

    Raises:
        EngineError: a fact could not be encoded, or was not injected where it should have been.
        BudgetError: the records of a conversation do not fit.
        PromptTooLongError: a prompt does not fit the model's context.
        ConfigError: a conversation's facts are not those that the log is about.
        InputError: a right answer has no tokens.
    """
    left = {conversation.id: list(_missing(conversation, asked, log)) for conversation in conversations}
    progress = Progress(sum(len(conditions) for todo in left.values() for _, conditions in todo), show)
    for conversation in conversations:
        if todo := left[conversation.id]:
            with opened(conversation, asked.policies, engine, settings, asked.source, progress.say) as memories:
                _check_facts(conversation, memories, log)
                for policy, encoded in memories.encoded.items():
                    log.add(ENCODED, {"conversation": conversation.id, "policy": policy, **asdict(encoded)})
                _ask_all(conversation, todo, Asker(memories, asked), log, progress)


def _check_facts(conversation: Conversation, memories: Memories, log: Log) -> None:
    """Facts that an LLM extracts may be others each time; what was asked about them cannot be compared, then."""
    now = {encoded.facts_sha256 for encoded in memories.encoded.values()}
    before = {
        line["facts_sha256"]
        for line in log.lines(ENCODED)
        if line["conversation"] == conversation.id and "facts_sha256" in line
    }
    if before - now:
        raise ConfigError(
            f"{conversation.id}: the facts are not those that its answers so far are about (extracted anew?); give "
            "another --json."
        )


Todo = list[tuple[Question, list[tuple[int, Condition]]]]


def _missing(
    conversation: Conversation, asked: Asked, log: Log
) -> Iterator[tuple[Question, list[tuple[int, Condition]]]]:
    twice = set(spread(conversation.questions, asked.again))
    for question in conversation.questions:
        wanted = [(k, condition) for k in asked.ks for condition in asked.conditions(question in twice)]
        missing = [
            (k, c) for k, c in wanted if not log.has(ANSWER, conversation.id, question.number, c.policy, c.text_tail, k)
        ]
        if missing:
            yield question, missing


def _ask_all(conversation: Conversation, todo: Todo, asker: Asker, log: Log, progress: Progress) -> None:
    def ask(question: Question, missing: list[tuple[int, Condition]]) -> None:
        try:
            for line in asker.ask(question, missing):
                log.add(ANSWER, {"conversation": conversation.id, **line})
                progress.done(f"{conversation.id}, question {question.number}, k={line['k']}")
        except InputError as error:
            raise InputError(f"{conversation.id}, question {question.number}: {error}") from error

    with ThreadPoolExecutor(asker.asked.at_once, thread_name_prefix="inferscale-eval") as pool:
        under_way = [pool.submit(ask, question, missing) for question, missing in todo]
        try:
            for one in as_completed(under_way):
                one.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Asker:
    """Asks questions of one conversation's memory."""

    def __init__(self, memories: Memories, asked: Asked) -> None:
        self.asked = asked
        self._memories = memories
        self._tokenizer = memories.services[ALONE].engine.tokenizer

    def ask(self, question: Question, missing: Sequence[tuple[int, Condition]]) -> Iterator[dict[str, Any]]:
        """A question's lines for the log, as they are done."""
        message = f"{question.text}\n{self.asked.instruction}" if self.asked.instruction else question.text
        # The right answer's tokens as they stand at the start of an answer, without the token that ends it: whether a
        # model would stop there says more about its style than about what it remembers.
        gold = self._tokenizer.encode(question.answer, literal=True)
        if not gold:
            raise InputError(f"Question {question.number} has an answer of no tokens: {question.answer!r}; remove it.")
        for k in self.asked.ks:
            conditions = [condition for at, condition in missing if at == k]
            if conditions:
                handles = self._memories.search(question.text, k)
                evidence = self._memories.evidence(handles)
                alone = self._memories.plan(ALONE, message, handles, 0)
                served = len(alone.facts)  # what says the same word for word is served once
                if (tail := max(condition.text_tail for condition in conditions)) >= served:
                    raise InputError(f"Only {served} facts were found, and a text tail of {tail} injects none.")
                text = _plain(alone)
                reference = None if Condition(TEXT) in conditions else self._score(Condition(TEXT), text, gold)
                for condition in conditions:  # TEXT comes first
                    plan = self._plan(condition, message, handles, text)
                    # Answered first: scoring leaves the prompt in the engine's prefix cache.
                    answered = self._answer(condition, plan, question) if self.asked.max_tokens else {}
                    scores = self._score(condition, plan, gold)
                    reference = scores if reference is None else reference
                    yield {
                        "question": question.number,
                        "category": question.category,
                        "k": k,
                        "policy": condition.policy,
                        "text_tail": condition.text_tail,
                        "facts": 0 if condition.policy == NONE else served,
                        "recall": None if condition.policy == NONE else recall(question.evidence, evidence),
                        "prompt_tokens": len(plan.token_ids),
                        "gold_tokens": len(gold),
                        **asdict(compare(reference, scores, gold)),
                        **answered,
                    }

    def _plan(self, condition: Condition, message: str, handles: Sequence[str], text: PromptPlan) -> PromptPlan:
        if condition.policy == NONE:
            chat = [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": message}]
            return self._memories.services[ALONE].plan(chat)
        if not condition.injected:
            return text
        plan = self._memories.plan(condition.policy, message, handles, condition.text_tail)
        if plan.token_ids != text.token_ids:
            raise EngineError(
                f"Facts of {condition.policy} are served in another order than as text: records are lost."
            )
        return plan

    def _answer(self, condition: Condition, plan: PromptPlan, question: Question) -> dict[str, Any]:
        began = time.perf_counter()
        sampling = Sampling(max_tokens=self.asked.max_tokens, temperature=0.0)
        chunks = list(self._service(condition).generate(plan, sampling))
        spent = 1000 * (time.perf_counter() - began)
        alone = self.asked.at_once == 1  # or else times are also of other questions
        report = chunks[-1].report
        assert report is not None, "the last chunk carries the report"
        self._check(condition, plan, report.facts_injected)
        text = "".join(chunk.text for chunk in chunks).strip()
        return {
            "answer": text,
            "f1": token_f1(text, question.answer),
            "bleu1": bleu1(text, question.answer),
            **({"answer_ms": spent, "ttft_ms": report.ttft_ms} if alone else {}),
        }

    def _score(self, condition: Condition, plan: PromptPlan, gold: Sequence[int]) -> Scores:
        scores, report = self._service(condition).score(plan, gold)
        self._check(condition, plan, report.facts_injected)
        return scores

    def _service(self, condition: Condition) -> MemoryService:
        return self._memories.services[condition.policy if condition.injected else ALONE]

    def _check(self, condition: Condition, plan: PromptPlan, injected: int) -> None:
        meant = sum(fact.record is not None for fact in plan.facts)
        if injected != meant:
            raise EngineError(
                f"{condition.policy}: {injected} facts were injected, {meant} were to be; nothing to compare."
            )


def _plain(plan: PromptPlan) -> PromptPlan:
    """The same tokens in the same order, with nothing to inject."""
    return PromptPlan(tuple(replace(s, kind="text", record=None, handle=None) for s in plan.segments))
