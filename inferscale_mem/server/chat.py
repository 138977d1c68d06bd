"""Handles in ``/v1/chat/completions``: found, checked, and handed on to vLLM as token ids and a signed order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

from inferscale_mem import wire
from inferscale_mem.accounting import account, why_not
from inferscale_mem.engines.vllm_chat import ChatReading, read_request
from inferscale_mem.engines.vllm_served import Overheard, ServedEngine, overhear
from inferscale_mem.errors import ChatTemplateError, InputError
from inferscale_mem.handles import UNKNOWN
from inferscale_mem.kv.directory import ABSENT, CHANGED
from inferscale_mem.placing import ELSEWHERE
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.protocols import Engine
from inferscale_mem.recording.headers import HeaderRecords
from inferscale_mem.server import bodies
from inferscale_mem.server.asgi import App, Receive, Scope, Send, refuse, replay
from inferscale_mem.server.facts import FactTable, Known
from inferscale_mem.server.reports import ReportedAnswer
from inferscale_mem.service import Resolved, permit
from inferscale_mem.types import InjectReport, Miss, PromptPlan

PLANNERS = 32
"""Planners kept: one for each way in which records are made and templates are filled in."""
HEADER_BACKOFF_S = 0.5
IN_VARIABLES = ELSEWHERE.format("chat_template_kwargs")
BEAMS = "beam search injects nothing: the fact was computed as text"


class _Prepared(NamedTuple):
    """A request's prompt, what of it vLLM is handed, and whether it is answered by beam search."""

    plan: PromptPlan
    request: dict[str, Any]
    beams: bool = False


@dataclass(frozen=True)
class _Found:
    """What a request's handles stand for.

    Attributes:
        order: those that ask for something, most similar first.
        known: all that stand for a fact of the request's store.
        resolved: what is served of ``order``.
        hidden: genuine ones that ask for nothing where they stand.
    """

    order: Sequence[str]
    known: Mapping[str, Known]
    resolved: Resolved
    hidden: frozenset[str]

    @property
    def genuine(self) -> set[str]:
        """All that no model is to read."""
        return {*self.resolved.facts, *self.hidden}


def _nothing(handles: Sequence[str], why: str) -> PromptPlan:
    return PromptPlan((), missed=tuple(Miss(handle, why) for handle in handles))


class ChatRequests:
    """Chat requests of any OpenAI client.

    Args:
        engine: that answers them.
        facts: what handles stand for.
    """

    def __init__(self, engine: ServedEngine, facts: FactTable) -> None:
        self._engine, self._facts = engine, facts
        room = engine.info.record_bytes // engine.info.bytes_per_token
        self._headers = HeaderRecords(cast(Engine, engine), backoff_s=HEADER_BACKOFF_S, room=room)
        self._planner = lru_cache(PLANNERS)(self._make_planner)

    async def handle(self, app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer one request: as vLLM does, with the facts behind its handles injected."""
        try:
            text = bodies.quick_text(body)
            prepared = None if text is None else await asyncio.to_thread(self._prepare, text)
        except InputError as error:
            await refuse(send, str(error))
            return
        if prepared is None:
            await app(scope, replay(body, receive), send)
            return
        plan, request, beams = prepared
        tokens = plan.token_ids if plan.facts else []
        ordered = bool(plan.facts) and not beams
        if ordered:
            await self._make_header(plan)
        ticket = wire.new_ticket() if ordered else ""
        params = wire.sign(wire.inject_params(plan, ticket), tokens, self._engine.key) if ordered else {}
        if plan.facts:
            request["kv_transfer_params"] = {"prompt_token_ids": tokens, **params}
        new = json.dumps(request).encode("ascii")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(new)).encode())]}
        with overhear(ticket) as heard:
            reported = ReportedAnswer(send, plan, lambda: self._report(plan, params, heard, beams=beams))
            try:
                await app(scope, replay(new, receive), reported.send)
            finally:
                reported.close()

    # Before the answer.

    def _prepare(self, text: str) -> _Prepared | None:
        """The prompt, and the request to hand on, without genuine handles; None if it has nothing to do with memories.

        A plan without facts is not used: vLLM makes the prompt, and all other handles are just text.

        Raises:
            InputError: the request is one that vLLM would break on, tries to change how prompts are made, or asks
                for memories in a form that cannot be read.
        """
        request = bodies.read_chat(text)
        if request is None:
            return None
        asked = bodies.read_asked(request.pop(bodies.FIELD, None))
        reading = self._read(request)
        handles = list(dict.fromkeys([*bodies.asked_handles(request, asked.memories), *bodies.prompt_handles(request)]))
        if reading.refused:  # in vLLM's own words
            return _Prepared(_nothing(handles, "vLLM refuses the request"), request)
        messages = [bodies.as_rendered(message) for message in request["messages"]]
        found = self._look_up(request, asked)
        handed_on = bodies.without(request, found.genuine)
        try:
            if reading.other:
                raise InputError(f"memories cannot be combined with {reading.other}")
            if self._read(handed_on).media:
                raise InputError("memories cannot be combined with content that is not text")
            plan = self._planned(request, messages, found, reading.variables or {})
            return _Prepared(plan, handed_on, reading.beams)
        except (InputError, ChatTemplateError) as error:
            return _Prepared(_nothing(handles, str(error)), handed_on)

    def _read(self, request: Mapping[str, Any]) -> ChatReading:
        return read_request(request, self._engine.tokenizer.hf, self._engine.template_kwargs)

    def _look_up(self, request: Mapping[str, Any], asked: bodies.Asked) -> _Found:
        """What the request's handles stand for."""
        order = bodies.asked_handles(request, asked.memories)
        looked_up = {handle: self._facts.get(handle) for handle in [*order, *bodies.prompt_handles(request)]}
        first = next((looked_up[handle] for handle in order if isinstance(looked_up[handle], Known)), None)
        first = first or next((found for found in looked_up.values() if isinstance(found, Known)), None)
        known = {
            handle: found
            for handle, found in looked_up.items()
            if isinstance(found, Known) and isinstance(first, Known) and found.store == first.store
        }
        missed = {
            handle: Miss(handle, UNKNOWN if isinstance(found := looked_up[handle], Known) else found)
            for handle in order
            if handle not in known
        }
        asked_for = {handle: known[handle].fact for handle in order if handle in known}
        resolved = permit(asked_for, asked.scope, missed)
        others = {handle: found.fact for handle, found in known.items() if handle not in order}
        return _Found(order, known, resolved, frozenset(permit(others, resolved.scope, {}).facts))

    def _planned(
        self,
        request: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        found: _Found,
        variables: Mapping[str, Any],
    ) -> PromptPlan:
        first = next((found.known[handle] for handle in found.resolved.facts), None)
        variables = bodies.without({"chat_template_kwargs": variables}, found.genuine)["chat_template_kwargs"]
        inert = set(bodies.handles_in(request.get("chat_template_kwargs"))) - {*found.order}
        planner = self._planner(first.fingerprint if first else "", json.dumps(variables, sort_keys=True))
        return planner.plan(
            messages,
            found.resolved.facts,
            order=found.order,
            is_ready=self._facts.is_ready,
            scope=found.resolved.scope,
            store=first.store if first else "",
            missed=[*found.resolved.missed, *(Miss(handle, IN_VARIABLES) for handle in inert)],
            lasting={handle: known.handle for handle, known in found.known.items()},
            text_tail=first.text_tail if first else 0,
            free_tokens=first.free_tokens if first else 0,
            tools=None if request.get("tool_choice") == "none" else request.get("tools"),
            hide=found.hidden,
        )

    def _make_planner(self, fingerprint: str, template_kwargs: str) -> PromptPlanner:
        tokenizer = self._engine.tokenizer.with_template_kwargs(json.loads(template_kwargs))
        return PromptPlanner(tokenizer, fingerprint)

    async def _make_header(self, plan: PromptPlan) -> None:
        ready = any(fact.record is not None and self._facts.is_ready(fact.record) for fact in plan.facts)
        if ready and plan.segments[0].kind == "header":
            await self._headers.aensure(plan.segments[0])

    # Behind the answer.

    def _report(self, plan: PromptPlan, params: Mapping[str, Any], heard: Overheard, *, beams: bool) -> InjectReport:
        self._facts.note(params, heard.answer)
        report = wire.inject_report(plan, heard.answer if params else {}, heard.ttft_ms)
        lost = {miss.handle for miss in report.missed if miss.reason in (ABSENT, CHANGED)}
        for segment in plan.segments:
            if segment.kind == "header" and segment.record in lost:
                self._headers.forget(segment.record)
        return account(plan, report, (lambda *asked: BEAMS) if beams else why_not)
