"""Handles in ``/v1/chat/completions``: found, checked, and handed on to vLLM as token ids and a signed order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from inferscale_mem import wire
from inferscale_mem.accounting import account, why_not
from inferscale_mem.engines.vllm_served import Overheard, ServedEngine, overhear
from inferscale_mem.errors import ChatTemplateError, InputError
from inferscale_mem.handles import UNKNOWN
from inferscale_mem.kv.directory import ABSENT, CHANGED
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.protocols import Engine
from inferscale_mem.recording.headers import HeaderRecords
from inferscale_mem.server import bodies
from inferscale_mem.server.asgi import App, Receive, Scope, Send, replay
from inferscale_mem.server.facts import FactTable, Known
from inferscale_mem.server.reports import ReportedAnswer
from inferscale_mem.service import permit
from inferscale_mem.types import InjectReport, Miss, PromptPlan
from inferscale_mem.types import Scope as Owner

PLANNERS = 32
"""Planners kept: one for each way in which records are made and templates are filled in."""
HEADER_BACKOFF_S = 0.5


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
        concerns_us = b"ism1." in body or b'"inferscale"' in body
        request = bodies.read_chat(body) if concerns_us else None
        if request is None:
            await app(scope, replay(body, receive), send)
            return
        asked = request.pop(bodies.FIELD, None)
        plan = await asyncio.to_thread(self._plan, request, asked)
        await self._make_header(plan)
        tokens = plan.token_ids if plan.facts else []
        ticket = wire.new_ticket() if plan.facts else ""
        params = wire.sign(wire.inject_params(plan, ticket), tokens, self._engine.key) if plan.facts else {}
        if plan.facts:
            request["kv_transfer_params"] = {"prompt_token_ids": tokens, **params}
        new = json.dumps(request).encode("ascii")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(new)).encode())]}
        with overhear(ticket) as heard:
            reported = ReportedAnswer(send, plan, lambda: self._report(plan, params, heard))
            try:
                await app(scope, replay(new, receive), reported.send)
            finally:
                reported.close()

    # Before the answer.

    def _plan(self, request: Mapping[str, Any], asked: Any) -> PromptPlan:
        """The prompt. Without facts it is not used: vLLM makes it, and handles are just text."""
        handles = bodies.asked_handles(request, asked)
        try:
            bodies.check_prompt(request)
            return self._planned(request, handles, bodies.asked_scope(asked))
        except (InputError, ChatTemplateError) as error:
            return PromptPlan((), missed=tuple(Miss(handle, str(error)) for handle in handles))

    def _planned(self, request: Mapping[str, Any], handles: Sequence[str], scope: Owner | None) -> PromptPlan:
        looked_up = {handle: self._facts.get(handle) for handle in handles}
        known = {handle: found for handle, found in looked_up.items() if isinstance(found, Known)}
        first = next(iter(known.values()), None)
        known = {handle: found for handle, found in known.items() if first and found.store == first.store}
        missed = {
            handle: Miss(handle, UNKNOWN if isinstance(found, Known) else found)
            for handle, found in looked_up.items()
            if handle not in known
        }
        resolved = permit({handle: found.fact for handle, found in known.items()}, scope, missed)
        kwargs = bodies.template_kwargs(request, self._engine.template_kwargs)
        planner = self._planner(first.fingerprint if first else "", json.dumps(kwargs, sort_keys=True))
        return planner.plan(
            [bodies.with_read_calls(message) for message in request["messages"]],
            resolved.facts,
            order=handles,
            is_ready=self._facts.is_ready,
            scope=resolved.scope,
            store=first.store if first else "",
            missed=resolved.missed,
            lasting={handle: found.handle for handle, found in known.items()},
            text_tail=first.text_tail if first else 0,
            free_tokens=first.free_tokens if first else 0,
            tools=None if request.get("tool_choice") == "none" else request.get("tools"),
        )

    def _make_planner(self, fingerprint: str, template_kwargs: str) -> PromptPlanner:
        tokenizer = self._engine.tokenizer.with_template_kwargs(json.loads(template_kwargs))
        return PromptPlanner(tokenizer, fingerprint)

    async def _make_header(self, plan: PromptPlan) -> None:
        ready = any(fact.record is not None and self._facts.is_ready(fact.record) for fact in plan.facts)
        if ready and plan.segments[0].kind == "header":
            await self._headers.aensure(plan.segments[0])

    # Behind the answer.

    def _report(self, plan: PromptPlan, params: Mapping[str, Any], heard: Overheard) -> InjectReport:
        self._facts.note(params, heard.answer)
        report = wire.inject_report(plan, heard.answer if params else {}, heard.ttft_ms)
        lost = {miss.handle for miss in report.missed if miss.reason in (ABSENT, CHANGED)}
        for segment in plan.segments:
            if segment.kind == "header" and segment.record in lost:
                self._headers.forget(segment.record)
        return account(plan, report, why_not)
