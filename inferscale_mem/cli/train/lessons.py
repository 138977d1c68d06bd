"""What a preamble is trained on: facts, what each is encoded behind, and questions, by the product's own path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferscale_mem.cli.eval.locomo import Conversation
from inferscale_mem.cli.eval.memories import ALONE, Memories, Say, Source, opened
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.encoding import Policy, encode_plan
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import InputError
from inferscale_mem.recording.jobs import oldest_first

MOST_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Fact:
    """One fact of some memory.

    Attributes:
        token_ids: its own.
        context: numbers of the facts that it is encoded behind, in their order; all are lower than its own.
    """

    token_ids: tuple[int, ...]
    context: tuple[int, ...]


@dataclass(frozen=True)
class Lesson:
    """A question, as it is served.

    Attributes:
        facts: numbers of those that were found, in the order of the prompt.
        question: tokens behind them.
        answer: tokens of the right one.
    """

    facts: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Lessons:
    """Facts of all conversations, numbered throughout, and all questions for each number of facts.

    Attributes:
        header: tokens in front of the facts.
        tokenizer: digest of tokenizer and chat template.
        facts: an earlier one never stands on a later one.
        by_k: number of facts searched for -> questions.
    """

    header: tuple[int, ...]
    tokenizer: str
    facts: tuple[Fact, ...]
    by_k: dict[int, tuple[Lesson, ...]]


def read_lessons(
    conversations: Sequence[Conversation],
    policy: Policy,
    ks: Sequence[int],
    engine: TransformersEngine,
    settings: InferScaleConfig,
    instruction: str,
    say: Say,
) -> Lessons:
    """Make a memory of each conversation, and note what its facts and questions are. Its records go unused.

    Args:
        conversations: theirs are the facts and questions.
        policy: what facts are encoded behind.
        ks: how many facts are searched for.
        engine: tokenises.
        settings: see ``eval.memories.opened``.
        instruction: stands behind each question.
        say: is told what is being done.

    Raises:
        InputError: a right answer has no tokens.
    """
    facts: list[Fact] = []
    by_k: dict[int, list[Lesson]] = {k: [] for k in ks}
    for conversation in conversations:
        with opened(conversation, (ALONE,), engine, settings, Source(), say) as memories:
            numbers = _facts(memories, policy, facts)
            for question in conversation.questions:
                answer = engine.tokenizer.encode(question.answer, literal=True)[:MOST_ANSWER_TOKENS]
                if not answer:
                    raise InputError(f"{conversation.id}: the right answer {question.answer!r} has no tokens.")
                for k in ks:
                    handles = memories.search(question.text, k)
                    plan = memories.plan(ALONE, f"{question.text} {instruction}".strip(), handles, 0)
                    found = tuple(numbers[segment.handle] for segment in plan.facts if segment.handle in numbers)
                    by_k[k].append(Lesson(found, plan.segments[-1].token_ids, tuple(answer)))
            header = memories.services[ALONE].planner.default_header().token_ids
    return Lessons(header, engine.tokenizer.digest, tuple(facts), {k: tuple(some) for k, some in by_k.items()})


def _facts(memories: Memories, policy: Policy, facts: list[Fact]) -> dict[str, int]:
    """Append a memory's facts, oldest first; returns their numbers by handle."""
    service = memories.services[ALONE]
    index, planner, mint = service.index, service.planner, service.signer.mint
    numbers: dict[str, int] = {}
    for fact in oldest_first(index.facts()):
        plan = encode_plan(policy, fact, mint(fact), index, planner, mint)
        *_, own = plan.segments
        context = [numbers[str(segment.handle)] for segment in plan.segments[:-1] if segment.handle is not None]
        numbers[mint(fact)] = len(facts)
        facts.append(Fact(own.token_ids, tuple(context)))
    return numbers
