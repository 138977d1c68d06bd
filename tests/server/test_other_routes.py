"""Routes that inject nothing, with an app of the test's own behind the middleware."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from recorder_helpers import forged

from inferscale_mem.handles import HandleSigner
from inferscale_mem.remote import Announcement
from inferscale_mem.server import middleware
from inferscale_mem.testing.scene import KEY
from inferscale_mem.types import Fact, Scope

SIGNER = HandleSigner(KEY, "store")
FACT = Fact("1", "Likes tea.", Scope(user_id="alice"), "1")
HANDLE = SIGNER.mint(FACT)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says what it is sent."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": (await receive())["body"]})


async def asked(path: str, text: str, **further: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    engine: Any = SimpleNamespace(
        key=KEY, admits=lambda given: True, info=SimpleNamespace(record_bytes=1 << 20, bytes_per_token=64)
    )
    server = middleware._Server(engine, app)
    server._facts.announce(Announcement("store", "print", 0, {HANDLE: FACT}))
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"prompt": text, **further}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    await server.handle({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions/batch", *middleware.OTHER])
async def test_known_handles_are_refused_and_others_pass_counted(path: str) -> None:
    status, _, body = await asked(path, f"Memory: {HANDLE}.")
    assert status == 400 and b"/v1/chat/completions" in body and b"tea" not in body
    status, headers, body = await asked(path, f"Memory: {forged(HANDLE)}.")
    assert (status, headers[b"x-inferscale-handles-refused"]) == (200, b"1")
    assert forged(HANDLE).encode() in body
    assert (await asked(path, "Hello."))[:2] == (200, {})
    status, _, body = await asked(path, "Hello.", kv_transfer_params=json.loads("[" * 200 + "]" * 200))
    assert status == 400 and b"kv_transfer_params is nested deeper" in body


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/embeddings"])
async def test_routes_that_answer_no_prompt_are_left_alone(path: str) -> None:
    status, headers, body = await asked(path, f"Memory: {HANDLE}.")
    assert (status, headers) == (200, {}) and HANDLE.encode() in body
