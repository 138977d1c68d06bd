"""The report on a request's memories, put into vLLM's answer to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inferscale_mem.prompt import REPEATED
from inferscale_mem.server.asgi import Message, Send
from inferscale_mem.server.bodies import FIELD
from inferscale_mem.types import InjectReport, PromptPlan

REQUESTED = b"x-inferscale-facts-requested"
REFUSED = b"x-inferscale-handles-refused"


class ReportedAnswer:
    """Passes an answer on, with counts in its headers, and the report in its JSON or its stream's usage chunk.

    Args:
        send: to the client.
        plan: of the request.
        report: asked for once, at the end.
    """

    def __init__(self, send: Send, plan: PromptPlan, report: Callable[[], InjectReport]) -> None:
        self._send, self._plan, self._make_report = send, plan, report
        self._start: Message | None = None
        self._body = b""
        self._made: InjectReport | None = None

    async def send(self, message: Message) -> None:
        """Take the next message of the answer."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._start is not None:
            await self._collect(message)
        elif message.get("body", b"").startswith(b"data: "):
            await self._send({**message, "body": self._in_stream(message["body"])})
        else:
            await self._send(message)

    def close(self) -> None:
        """The answer is over, whether it got to a report or not: what it tells about records must be learnt."""
        self._report({})

    async def _begin(self, message: Message) -> None:
        requested = len({fact.handle for fact in self._plan.facts} | {miss.handle for miss in self._plan.missed})
        refused = sum(miss.reason != REPEATED for miss in self._plan.missed)
        message = with_counts(message, requested, refused)
        if message["status"] == 200 and _is_json(message["headers"]):
            self._start = message
        else:
            await self._send(message)

    async def _collect(self, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        start, self._start = self._start, None
        assert start is not None
        body = self._in_object(self._body)
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _in_stream(self, event: bytes) -> bytes:
        """The same event; the one that holds nothing but the usage is where the report goes."""
        if b'"choices":[]' not in event or b'"usage":{' not in event:
            return event
        data, _, rest = event.removeprefix(b"data: ").partition(b"\n\n")
        return b"data: " + self._in_object(data) + b"\n\n" + rest

    def _in_object(self, text: bytes) -> bytes:
        said = json.loads(text)
        if not isinstance(said, dict):  # vLLM says null to a client that has gone
            return text
        said[FIELD] = self._report(said.get("usage") or {}).as_dict()
        params = said.get("kv_transfer_params")
        if isinstance(params, dict):  # the report says all of it, in words
            said["kv_transfer_params"] = {name: value for name, value in params.items() if name != FIELD} or None
        return json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def _report(self, usage: dict[str, Any]) -> InjectReport:
        if self._made is None:
            self._made = self._make_report()
        prompt = usage.get("prompt_tokens")
        if prompt is None:
            return self._made
        return replace(self._made, tokens_prefilled=prompt - self._made.tokens_injected)


def with_counts(start: Message, requested: int, refused: int) -> Message:
    """The start of an answer with the counts of its request's handles in the headers."""
    counts = [(REQUESTED, requested), (REFUSED, refused)]
    return {**start, "headers": [*start.get("headers", ()), *((name, str(count).encode()) for name, count in counts)]}


def counted(send: Send, requested: int, refused: int) -> Send:
    """Passes an answer on as it is, with these counts in its headers."""

    async def sent(message: Message) -> None:
        start = message["type"] == "http.response.start"
        await send(with_counts(message, requested, refused) if start else message)

    return sent


def _is_json(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"application/json") for name, value in headers)
