"""The ASGI middleware: our own routes, and handles in chat requests. Everything else passes untouched."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qs

from inferscale_mem import remote
from inferscale_mem.engines.vllm_served import ServedEngine
from inferscale_mem.errors import InferScaleError, InputError
from inferscale_mem.handles import UNKNOWN
from inferscale_mem.server import bodies
from inferscale_mem.server.asgi import (
    App,
    Gone,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    read_body,
    refuse,
    replay,
    until_gone,
)
from inferscale_mem.server.chat import ChatRequests
from inferscale_mem.server.facts import FactTable
from inferscale_mem.server.reports import counted

CHAT = "/v1/chat/completions"
OTHER = (
    *("/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/invocations"),
    *("/v1/systemone", "/generative_scoring", "/cohere/v2/chat"),
)
"""Routes that answer prompts, too, and where memories cannot be injected."""


class MemoryMiddleware:
    """For vLLM's ``--middleware``. The server does not come up unless connector, model and self-test are in order.

    Args:
        app: what follows: all of vLLM's server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._server: _Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] != "http" or self._server is None:
            await self._app(scope, receive, send)
        else:
            await self._server.handle(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        waiting = [await receive()]
        try:
            engine = ServedEngine(scope["app"].state)
            await engine.start()
        except InferScaleError as error:
            await send({"type": "lifespan.startup.failed", "message": f"inferscale-mem: {error}"})
            return
        self._server = _Server(engine, self._app)

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replayed, send)


class _Server:
    """All that a running server needs."""

    def __init__(self, engine: ServedEngine, app: App) -> None:
        self._engine, self._app = engine, app
        self._facts = FactTable(engine.key)
        self._chat = ChatRequests(engine, self._facts)
        self._routes = {
            ("GET", "info"): self._info,
            ("POST", "requests"): self._requests,
            ("POST", "facts"): self._announce,
        }

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Gone):
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if path.startswith(f"{remote.PREFIX}/"):
            await self._own(path.removeprefix(f"{remote.PREFIX}/"), headers, scope, receive, send)
        elif path == CHAT and scope["method"] == "POST" and self._engine.admits(headers.get("authorization", "")):
            await self._chat.handle(self._app, scope, await read_body(receive), receive, send)
        elif path in OTHER and scope["method"] == "POST" and self._engine.admits(headers.get("authorization", "")):
            await self._other(path, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _other(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Prompts of other routes: with a memory's handle in them they are refused, not answered without the memory."""
        body = await read_body(receive)
        said = bodies.read_any(body)
        try:
            bodies.check_order(said)
        except InputError as error:
            await refuse(send, str(error))
            return
        handles = bodies.handles_in(said)
        if known := [handle for handle in handles if self._facts.get(handle) != UNKNOWN]:
            message = (
                f"The request to {path} holds handles of memories ({len(known)}), which are not injected there. Send "
                f"it to {CHAT}, or give what memory.resolve makes of them, which is text."
            )
            await refuse(send, message)
            return
        await self._app(scope, replay(body, receive), counted(send, len(handles), len(handles)) if handles else send)

    async def _own(self, name: str, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], name))
        if not self._engine.admits(headers.get("authorization", "")):
            await answer(send, 401, {"error": "Unauthorized"})
        elif route is None:
            await answer(send, 404, {"error": f"There is no {scope['method']} {name}."})
        else:
            try:
                await route(headers, scope, receive, send)
            except Gone:
                raise
            except InferScaleError as error:
                await answer(send, 400 if isinstance(error, InputError) else 500, remote.error_to_json(error))

    async def _info(self, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine
        nonce = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("nonce", [""])[0]
        proof = remote.prove(engine.key, nonce) if len(nonce) >= remote.MIN_NONCE else ""
        found = remote.ServerInfo(engine.info, engine.vocab_size, engine.tokenizer.digest, proof)
        await answer(send, 200, found.to_json())

    async def _announce(self, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if not remote.is_signed_body(body, headers.get(remote.SIGNATURE, ""), self._engine.key):
            await answer(send, 403, {"error": "The body is not signed with this server's handle key."})
            return
        await answer(send, 200, self._facts.announce(remote.Announcement.from_bytes(body)).to_json())

    async def _requests(self, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked = remote.request_from_json(json.loads(await read_body(receive)))
        except (ValueError, RecursionError) as error:
            raise error if isinstance(error, InputError) else InputError("The body is not JSON.") from error
        outputs = self._outputs(*asked)
        first = await anext(outputs)  # errors up to here are answered with their own status
        async with contextlib.aclosing(outputs):
            await until_gone(_stream(first, outputs, send), receive)

    async def _outputs(
        self, tokens: Any, sampling: Any, params: Any, room: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Lines of the answer."""
        async with contextlib.aclosing(self._engine.run(tokens, sampling, params, room)) as outputs:
            async for output in outputs:
                self._facts.note(params, output.answer)
                chunks = [remote.chunk_to_json(chunk) for chunk in output.chunks]
                yield {"chunks": chunks, "answer": output.answer, "cached": output.cached}
        yield {"chunks": [], "end": True}


async def _stream(first: Any, rest: AsyncGenerator[Any, None], send: Send) -> None:
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _line(first), "more_body": True})
    try:
        async for output in rest:
            await send({"type": "http.response.body", "body": _line(output), "more_body": True})
    except InferScaleError as error:
        line = _line(remote.error_to_json(error))
        await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _line(said: Any) -> bytes:
    return json.dumps(said).encode("ascii") + b"\n"
