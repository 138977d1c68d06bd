"""One conversation's memory, made through the product's own path, and its facts encoded by each policy.

All policies look at the same facts of one real memory in a temporary folder: each has a ``MemoryService`` of its own
over that memory's index, and its name in its records' ids keeps the records apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from inferscale_mem.adapters.mem0 import InferScaleMemory
from inferscale_mem.cli.eval.locomo import Conversation, Turn
from inferscale_mem.config import EncodingConfig, InferScaleConfig
from inferscale_mem.errors import BudgetError, EngineError
from inferscale_mem.kv.directory import PAGE_SIZE
from inferscale_mem.protocols import Engine, FactIndex
from inferscale_mem.service import MemoryService
from inferscale_mem.types import Fact, PromptPlan, Scope

ALONE = "alone"
"""What the share of the gap that a policy closes is measured from. It is always among the policies."""

OWNER = Scope(user_id="evaluated")
"""Of all facts: each conversation has a store of its own, and its name in the file may be no user's."""

Say = Callable[[str], None]
"""Shows what is being done."""


@dataclass(frozen=True)
class Source:
    """Where facts come from.

    Attributes:
        dates: see ``locomo.DATES``.
        extract: have the memory's LLM find facts in the dialog, instead of taking the data set's observations.
        mem0: Mem0's configuration (llm, embedder); what it leaves out is as in any memory.
    """

    dates: str = "behind"
    extract: bool = False
    mem0: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Encoded:
    """What encoding one conversation's facts took under one policy.

    Attributes:
        facts: how many.
        own_tokens: of the facts themselves.
        tokens_prefilled: that the engine computed.
        tokens_injected: context that came from records.
        ms: that the engine took.
        again_per_delete: facts to be encoded again when one of them is deleted, mean over all.
        facts_sha256: of their texts, oldest first.
    """

    facts: int
    own_tokens: int
    tokens_prefilled: int
    tokens_injected: int
    ms: float
    again_per_delete: float
    facts_sha256: str


class Memories:
    """An open memory of one conversation.

    Attributes:
        services: policy -> what plans and answers with its records.
        encoded: policy -> what that took.
    """

    def __init__(self, memory: InferScaleMemory, scope: Scope, services: Mapping[str, MemoryService]) -> None:
        self._memory = memory
        self._scope = scope
        self.services = services
        self.encoded: dict[str, Encoded] = {}

    def search(self, question: str, k: int) -> list[str]:
        """Handles, most similar first."""
        hits = self._memory.search(question, filters=self._scope.owners, top_k=k, threshold=0.0)["results"]
        return [str(hit["memory"]) for hit in hits]

    def plan(self, policy: str, message: str, handles: Sequence[str], text_tail: int) -> PromptPlan:
        """The prompt that a chat model would send."""
        chat = [{"role": "user", "content": message}]
        return self.services[policy].plan(chat, handles, self._scope, text_tail=text_tail)

    def evidence(self, handles: Sequence[str]) -> list[tuple[str, ...]]:
        """Per fact, the turns it was taken from."""
        found = self.services[ALONE].resolve(handles, self._scope).facts.values()
        return [_turns_of(fact) for fact in found]


@contextlib.contextmanager
def opened(
    conversation: Conversation,
    policies: Sequence[str],
    engine: Engine,
    settings: InferScaleConfig,
    source: Source,
    say: Say,
) -> Iterator[Memories]:
    """A conversation's memory with all facts encoded by all policies; gone at the end, its records too.

    Args:
        conversation: what is to be remembered.
        policies: ALONE among them.
        engine: keeps the records; stays open.
        settings: the handle key must be the engine's.
        source: where facts come from.
        say: is told what is being done.

    Raises:
        BudgetError: the engine's record budget does not hold them.
        EngineError: a fact could not be encoded.
    """
    with tempfile.TemporaryDirectory(prefix="inferscale-eval-") as folder, contextlib.ExitStack() as stack:
        own = replace(settings, home=Path(folder), encoding=EncodingConfig(policy=ALONE))
        memory = InferScaleMemory.from_config({**(source.mem0 or {}), "inferscale": own}, engine=engine)
        stack.callback(memory.close)
        scope = OWNER
        _add(memory, conversation, scope, source, say)
        services = {ALONE: memory.service}
        index = cast(FactIndex, DialogIndex(memory.service.index, conversation.turns))
        for policy in policies:
            if policy != ALONE:
                services[policy] = MemoryService(engine, index, memory.service.signer, EncodingConfig(policy=policy))
                stack.callback(services[policy].close)
        facts = index.facts(scope)
        _check_budget(services[ALONE], facts, len(services))
        stack.callback(engine.drop, [memory.service.signer.mint(fact) for fact in facts])
        memories = Memories(memory, scope, services)
        for policy, service in services.items():
            if policy != ALONE:
                service.add(facts)
            _wait(service, f"{conversation.id}: {policy}", say)
            memories.encoded[policy] = _encoded(service, facts)
        yield memories


class DialogIndex:
    """A memory's index, whose dialog turns are the data set's: the last ones up to those a fact was taken from.

    The memory itself has only seen the facts.
    """

    def __init__(self, index: FactIndex, turns: Sequence[Turn]) -> None:
        self._index = index
        self._said = [f"{turn.speaker}: {turn.text}" for turn in turns]
        self._place = {turn.id: place for place, turn in enumerate(turns)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def last_used(self, scope: Scope) -> float:
        """See protocols.FactIndex."""
        return 0.0

    def turns(self, fact: Fact, w: int) -> list[str]:
        """See protocols.FactIndex."""
        end = 1 + max((self._place[turn] for turn in _turns_of(fact) if turn in self._place), default=-1)
        return self._said[max(0, end - w) : end]


def _turns_of(fact: Fact) -> tuple[str, ...]:
    return tuple(str(fact.metadata.get("evidence", "")).split())


def _add(memory: InferScaleMemory, conversation: Conversation, scope: Scope, source: Source, say: Say) -> None:
    if source.extract:
        _extract(memory, conversation, scope, source, say)
        return
    for number, fact in enumerate(conversation.facts):
        say(f"{conversation.id}: adding fact {number + 1} of {len(conversation.facts)}")
        metadata = {"evidence": " ".join(fact.evidence), "speaker": fact.speaker}
        memory.add(fact.dated(source.dates), metadata=metadata, infer=False, **scope.owners)


def _extract(memory: InferScaleMemory, conversation: Conversation, scope: Scope, source: Source, say: Say) -> None:
    """Add the dialog pair of turns by pair, as a chat would; a fact's evidence is the pair it came from."""
    turns = conversation.turns
    for start in range(0, len(turns), 2):
        say(f"{conversation.id}: extracting facts, turn {start + 1} of {len(turns)}")
        pair = turns[start : start + 2]
        messages = [{"role": "user", "content": _said(turn, source.dates)} for turn in pair]
        memory.add(messages, metadata={"evidence": " ".join(turn.id for turn in pair)}, infer=True, **scope.owners)


def _said(turn: Turn, dates: str) -> str:
    return f"{turn.speaker}: {turn.text}" if dates == "off" else f"({turn.date}) {turn.speaker}: {turn.text}"


def _check_budget(service: MemoryService, facts: Sequence[Fact], policies: int) -> None:
    info = service.engine.info
    pages = sum(-(-len(service.planner.fact_tokens(fact.text)) // PAGE_SIZE) for fact in facts)
    header = -(-len(service.planner.default_header().token_ids) // PAGE_SIZE)
    needed = (policies * pages + header) * PAGE_SIZE * info.bytes_per_token
    if needed > info.record_bytes:
        raise BudgetError(
            f"Records of {len(facts)} facts under {policies} policies need {needed / 1e9:.2f} GB, the budget is "
            f"{info.record_bytes / 1e9:.2f}; raise --record-gb, or evaluate fewer policies at a time."
        )


def _wait(service: MemoryService, what: str, say: Say) -> None:
    while left := service.recorder.pending:
        say(f"{what}, {left} facts to encode")
        service.wait(timeout=1.0)
    failures = service.recorder.failures
    if failures:
        handle, reason = next(iter(failures.items()))
        raise EngineError(f"{len(failures)} facts were not encoded, so nothing can be compared; {handle}: {reason}")


def _encoded(service: MemoryService, facts: Sequence[Fact]) -> Encoded:
    counters = service.recorder.counters
    return Encoded(
        facts=len(facts),
        own_tokens=sum(len(service.planner.fact_tokens(fact.text)) for fact in facts),
        tokens_prefilled=counters["tokens_prefilled"],
        tokens_injected=counters["tokens_injected"],
        ms=counters["encode_us"] / 1000,
        again_per_delete=statistics.mean(
            len(service.recorder.standing_on([service.signer.mint(fact)])) for fact in facts
        ),
        facts_sha256=hashlib.sha256("\n".join(fact.text for fact in facts).encode()).hexdigest(),
    )
