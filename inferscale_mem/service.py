"""The one object that memory and chat model share: facts, handles, plans and answers around one engine."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inferscale_mem.accounting import NOT_INJECTED as NOT_INJECTED
from inferscale_mem.accounting import TEXT_TAIL as TEXT_TAIL
from inferscale_mem.accounting import account, why_not
from inferscale_mem.config import EncodingConfig
from inferscale_mem.encoding import ALIKE, parse_policy
from inferscale_mem.errors import BudgetError, EngineError, FactError, HandleError, InputError, ScopeError
from inferscale_mem.handles import UNKNOWN, HandleSigner, split
from inferscale_mem.kv.directory import ABSENT
from inferscale_mem.placing import SYSTEM
from inferscale_mem.prompt import Position, PromptPlanner, check_length
from inferscale_mem.protocols import Engine, FactIndex, Scorer
from inferscale_mem.recording.owed import OwedDrops
from inferscale_mem.recording.recorder import Recorder
from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.text_tail import free_tokens
from inferscale_mem.tool_template import Tools
from inferscale_mem.types import Chunk, Fact, InjectReport, Messages, Miss, PromptPlan, Sampling, Scope, Segment
from inferscale_mem.wire import NO_CONNECTOR as NO_CONNECTOR

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

FOREIGN = "belongs to another owner"
MIXED = "the request's memories belong to more than one owner"


@dataclass(frozen=True)
class Resolved:
    """What a request's handles stand for.

    Attributes:
        facts: the valid ones, in the order given; no handle twice, but a fact, if it was asked for by two handles.
        missed: all others, with reasons.
        scope: the request's scope: as given, else implied by the facts; None if neither.
    """

    facts: dict[str, Fact]
    missed: tuple[Miss, ...] = ()
    scope: Scope | None = None


def permit(facts: Mapping[str, Fact], scope: Scope | None, missed: Mapping[str, Miss]) -> Resolved:
    """Those of the genuine handles' facts that a request may see.

    Args:
        facts: by handle, in the request's order.
        scope: of the request; None takes the one that stands behind all facts, or refuses all if there is none.
        missed: handles that are not genuine.
    """
    refused = dict(missed)
    if scope is None and facts:
        try:
            scope = Scope.shared(fact.scope for fact in facts.values())
        except ScopeError:
            refused.update((handle, Miss(handle, MIXED)) for handle in facts)
            return Resolved({}, tuple(refused.values()))
    shown = {handle: fact for handle, fact in facts.items() if scope is not None and scope.covers(fact.scope)}
    refused.update((handle, Miss(handle, FOREIGN)) for handle in facts if handle not in shown)
    return Resolved(shown, tuple(refused.values()), scope)


class MemoryService:
    """Resolves handles, plans prompts, answers them, and keeps the engine's records in step with the facts.

    Thread-safe. Owns the recorder; the engine is closed by whoever opened it.

    Args:
        engine: answers prompts and holds records.
        index: the durable facts.
        signer: mints and verifies handles.
        config: how facts are encoded and served.
        owed: drops that an earlier process could not have done.
        unknown: what a request is told about handles that stand for nothing here.

    Attributes:
        text_tail: so many facts of a prompt are left to prefill.
        free_tokens: and as many as fit in so many tokens, with what stands behind them.

    Raises:
        ConfigError: the encoding policy cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        index: FactIndex,
        signer: HandleSigner,
        config: EncodingConfig,
        *,
        owed: OwedDrops | None = None,
        unknown: str = UNKNOWN,
    ) -> None:
        self.engine = engine
        self._unknown = unknown
        self.index = index
        self.signer = signer
        self.config = config
        policy = parse_policy(config.policy)
        made_by = f"{engine.info.fingerprint} {policy.name} {ALIKE}".encode()
        self.fingerprint = hashlib.sha256(made_by).hexdigest()[:16]
        self.planner = PromptPlanner(engine.tokenizer, self.fingerprint)
        self.recorder = Recorder(engine, index, signer, self.planner, policy, owed=owed)
        self.text_tail = config.text_tail if isinstance(config.text_tail, int) else 0
        self.free_tokens = free_tokens(engine) if config.text_tail == "auto" and engine.info.connector else 0
        self._warned_forged = False

    # Facts.

    def handle(self, fact: Fact) -> str:
        """A handle of this revision of a fact, to hand out."""
        return self.signer.issue(fact)

    def check_fact(self, text: str) -> None:
        """Refuse what cannot be a fact, before anything of it is stored.

        Raises:
            FactError: nothing to read in it, half a surrogate pair, or more tokens than a fact may have.
            BudgetError: its record would be larger than the whole record budget.
        """
        if lone := next((c for c in text if "\ud800" <= c <= "\udfff"), None):
            raise FactError(
                f"The fact has half a surrogate pair (U+{ord(lone):04X}), which is no character; decode its source "
                "with errors='replace', or remove it."
            )
        if not any(character.isprintable() and not character.isspace() for character in text):
            raise FactError("The fact is empty; give it some text.")
        info = self.engine.info
        tokens = len(self.planner.fact_tokens(text))
        limit = self.config.max_fact_tokens or max(1, info.max_model_len // 4)
        if tokens > limit:
            raise FactError(
                f"The fact has {tokens} tokens, at most {limit} are allowed; split it into several facts, or raise "
                "encoding.max_fact_tokens."
            )
        if info.connector and tokens * info.bytes_per_token > info.record_bytes:
            raise BudgetError(
                f"The fact's record needs {tokens * info.bytes_per_token} bytes, the budget is {info.record_bytes}; "
                "raise engine.record_bytes."
            )

    def add(self, facts: Iterable[Fact]) -> None:
        """Have stored facts encoded in the background; returns at once."""
        new = list(facts)
        self.announce(new)
        self.recorder.add(new)

    def announce(self, facts: Iterable[Fact]) -> None:
        """Have a server know what handles stand for; what it has lost the records of is encoded again."""
        since = self.recorder.moment
        known = {self.signer.mint(fact): fact for fact in facts}
        try:
            missing = self._announce(known)
        except EngineError as error:
            logger.warning(
                "The server does not know %d facts, so it takes their handles for text: %s", len(known), error
            )
            return
        if missing:
            plan = PromptPlan(tuple(self.planner.fact_segment(known[handle].text, handle) for handle in missing))
            report = InjectReport(len(missing), 0, 0, 0, tuple(Miss(handle, ABSENT) for handle in missing))
            self.recorder.observe(report, plan, since)

    def _announce(self, facts: Mapping[str, Fact]) -> tuple[str, ...]:
        """Those of the facts, by lasting handle, that are known now and have no record."""
        said = Announcement(
            self.index.store, self.fingerprint, self.text_tail, facts, self.free_tokens, self.signer.strict
        )
        heard = self.engine.announce(said)
        # Most likely they were deleted while this was under way. The index knows: it is asked after the drop.
        back = {h: facts[h] for h in heard.gone if h in facts and self.index.by_handle_id(split(h)[0]) is not None}
        again = self.engine.announce(replace(said, facts=back, moment=heard.moment)) if back else Announced()
        return heard.missing + again.missing

    def remove(self, gone: Iterable[Fact | str]) -> None:
        """Forget the records of facts (or lasting handles) that the index no longer has, and all that has seen them."""
        self.recorder.remove(gone)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything added is encoded (or given up), at most ``timeout`` seconds; whether that is so."""
        return self.recorder.wait(timeout)

    # Requests.

    def resolve(self, handles: Iterable[str], scope: Scope | None = None) -> Resolved:
        """The facts behind handles, as far as the request may see them. Never raises for a bad handle.

        Unknown, stale, malformed and forged handles share one reason, so that trying out handles tells nothing about
        which facts exist. A genuine handle that has expired, or is of another owner, says so: whoever has it was given
        it.

        Args:
            handles: as the app sent them.
            scope: whose facts the request may see; None if it does not say. Then the facts must share one owner, or
                all are refused.
        """
        facts: dict[str, Fact] = {}
        missed: dict[str, Miss] = {}
        for handle in dict.fromkeys(handles):
            found = self._genuine(handle)
            if isinstance(found, Fact):
                facts[handle] = found
            else:
                missed[handle] = Miss(handle, found)
        return permit(facts, scope, missed)

    def _genuine(self, handle: str) -> Fact | str:
        """The fact that a handle stands for, or why it stands for none."""
        try:
            handle_id, _ = split(handle)
        except HandleError:
            return self._unknown
        fact = self.index.by_handle_id(handle_id)
        if fact is None:
            self.recorder.recheck([handle])
            return self._unknown
        reason = self.signer.refusal(handle, fact.scope)
        if reason == UNKNOWN and not self._warned_forged:
            self._warned_forged = True
            logger.warning("A handle's tag is wrong: forged, or made with another handle key or store name")
        return fact if reason is None else reason

    def alive(
        self, messages: Messages, memories: Sequence[str] = (), scope: Scope | None = None, human_handles: bool = False
    ) -> tuple[str, ...]:
        """The handles of a request that would be served now."""
        asked = self.planner.handles_in(messages, _roles(human_handles, scope))
        return tuple(self.resolve([*asked, *memories], scope).facts)

    def plan(
        self,
        messages: Messages,
        memories: Sequence[str] = (),
        scope: Scope | None = None,
        tools: Tools | None = None,
        call: str | None = None,
        text_tail: int | None = None,
        position: Position = "system",
        human_handles: bool = False,
    ) -> PromptPlan:
        """The prompt for these messages, with the memories whose handles stand in system messages or in ``memories``.

        Args:
            messages: the conversation.
            memories: further handles, most similar first.
            scope: whose facts may be shown; None takes it from the handles.
            tools: as chat templates take them.
            call: have the answer begin as a call of this tool, ``prompt.ANY_TOOL`` for any of them.
            text_tail: leave so many facts to ordinary prefill; None: as configured.
            position: where the memories stand: in the system message, or right before the latest human message.
            human_handles: those in human messages ask for something, too; needs a scope, since anybody may write them.

        Handles that ask for nothing where they stand are cut out if they are genuine, and stay what they are if not.

        Raises:
            InputError: ``human_handles`` without a scope.
            ChatTemplateError: the model has no template, or it refuses these messages.
        """
        roles = _roles(human_handles, scope)
        order = list(dict.fromkeys([*self.planner.handles_in(messages, roles), *memories]))
        resolved = self.resolve(order, scope)
        others = self.planner.other_handles_in(messages, roles, tools)
        hide = self.resolve(others, resolved.scope).facts if others else {}
        return self.planner.plan(
            messages,
            resolved.facts,
            order=order,
            is_ready=self.recorder.is_ready,
            scope=resolved.scope,
            store=self.signer.store,
            missed=resolved.missed,
            lasting={handle: self.signer.mint(fact) for handle, fact in resolved.facts.items()},
            text_tail=self.text_tail if text_tail is None else text_tail,
            free_tokens=self.free_tokens if text_tail is None else 0,
            tools=tools,
            call=call,
            position=position,
            roles=roles,
            hide=hide,
        )

    async def aplan(self, messages: Messages, *args: Any, **kwargs: Any) -> PromptPlan:
        """As plan, in a thread: the index may block."""
        return await asyncio.to_thread(self.plan, messages, *args, **kwargs)

    def generate(self, plan: PromptPlan, sampling: Sampling) -> Generator[Chunk, None, None]:
        """Answer a plan; the last chunk's report accounts for every handle of the request.

        Closing the generator early aborts the request.

        Raises:
            PromptTooLongError: prompt and answer do not fit the model's context.
            EngineClosedError: the engine is closed.
        """
        check_length(plan, self.engine.info.max_model_len, sampling.max_tokens)
        made = self.recorder.ensure_headers(headers) if (headers := self._headers_to_inject(plan)) else 0
        since = self.recorder.moment
        chunks = self.engine.generate(plan, sampling)
        try:
            for chunk in chunks:
                yield self._complete(plan, chunk, since, made if len(headers) > 1 else 0)
        finally:
            if isinstance(chunks, Generator):
                chunks.close()

    async def agenerate(self, plan: PromptPlan, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """As generate, on any event loop."""
        check_length(plan, self.engine.info.max_model_len, sampling.max_tokens)
        made = await self.recorder.aensure_headers(headers) if (headers := self._headers_to_inject(plan)) else 0
        since = self.recorder.moment
        chunks = self.engine.agenerate(plan, sampling)
        try:
            async for chunk in chunks:
                yield self._complete(plan, chunk, since, made if len(headers) > 1 else 0)
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    def score(self, plan: PromptPlan, answer: Sequence[int]) -> tuple[NDArray[np.float32], InjectReport]:
        """How likely a given answer is behind a plan's prompt, see ``protocols.Scorer``; the report as in ``generate``.

        Raises:
            InputError: the engine is no Scorer, or the answer is empty.
            PromptTooLongError: prompt and answer do not fit the model's context.
        """
        if not isinstance(self.engine, Scorer):
            raise InputError(f"{self.engine.info.version} does not give probabilities of whole answers.")
        check_length(plan, self.engine.info.max_model_len, len(answer))
        if headers := self._headers_to_inject(plan):
            self.recorder.ensure_headers(headers)
        since = self.recorder.moment
        scores, report = self.engine.score(plan, answer)
        self.recorder.observe(report, plan, since)
        return scores, self.account(plan, report)

    def _complete(self, plan: PromptPlan, chunk: Chunk, since: int, made: int) -> Chunk:
        """The chunk with its report completed. What was computed of the conversation just now was not saved."""
        report = chunk.report
        if report is None:
            return chunk
        self.recorder.observe(report, plan, since)
        now = min(made, report.tokens_injected)
        report = replace(
            report, tokens_injected=report.tokens_injected - now, tokens_prefilled=report.tokens_prefilled + now
        )
        return replace(chunk, report=self.account(plan, report))

    def account(self, plan: PromptPlan, report: InjectReport) -> InjectReport:
        """The engine's report, with each handle of the request counted as injected or listed once as missed."""
        return account(plan, report, self._why_not)

    def _why_not(self, fact: Segment, handle: str, said: Mapping[str, str]) -> str:
        if not self.engine.info.connector:
            return NO_CONNECTOR
        reason = why_not(fact, handle, said)
        failure = self.recorder.failure(handle) if reason == ABSENT else None
        return f"{reason}: {failure}" if failure else reason

    def _headers_to_inject(self, plan: PromptPlan) -> list[Segment]:
        """What stands in front of the facts, if anything can be injected behind it, or if it is a conversation."""
        headers = list(itertools.takewhile(lambda segment: segment.kind == "header", plan.segments))
        ready = any(fact.record is not None and self.recorder.is_ready(fact.record) for fact in plan.facts)
        return headers if ready or len(headers) > 1 else []

    def close(self) -> None:
        """Stop encoding; safe to call twice. The engine stays open."""
        self.recorder.close()


def _roles(human_handles: bool, scope: Scope | None) -> tuple[str, ...]:
    if not human_handles:
        return SYSTEM
    if scope is None:
        raise InputError(
            "Handles in human messages need a scope: give user_id= or scope=, so that nobody recalls others'."
        )
    return (*SYSTEM, "user")
