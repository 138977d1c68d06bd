"""A little ASGI: bodies read and played back, one answer sent, work that ends when nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from inferscale_mem.errors import InferScaleError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gone(InferScaleError):
    """Whoever sent the request has left."""


async def read_body(receive: Receive) -> bytes:
    """All of a request's body.

    Raises:
        Gone: it never came.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone("The client left before it had sent its request.")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """What a follower receives: this body, then whatever comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def answer(send: Send, status: int, said: Any) -> None:
    """One JSON answer."""
    body = json.dumps(said).encode("ascii")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(send: Send, message: str) -> None:
    """Answer a request of vLLM's as vLLM refuses one."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    await answer(send, 400, {"error": error})


async def until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work, or as much of it as there is somebody to do it for."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(done, Exception):
        raise done
