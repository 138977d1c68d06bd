from __future__ import annotations

import json
from typing import Any

from inferscale_mem.server.reports import ReportedAnswer, counted, with_counts
from inferscale_mem.types import InjectReport, Miss, PromptPlan, Segment

PLAN = PromptPlan((Segment("fact", (1, 2), "r", "h1"), Segment("text", (3,))), missed=(Miss("h2", "unknown"),))
REPORT = InjectReport(2, 1, 2, 1, (Miss("h2", "unknown"),), 5.0)


async def passed(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asked = []
    answer = ReportedAnswer(send, PLAN, lambda: asked.append(1) or REPORT)  # type: ignore[func-returns-value]
    for message in messages:
        await answer.send(message)
    answer.close()
    assert asked == [1]
    return sent


def start(kind: bytes, status: int = 200) -> dict[str, Any]:
    headers = [(b"content-type", kind), (b"content-length", b"7")]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


async def test_the_report_is_in_the_json() -> None:
    said = {"choices": ["é"], "usage": {"prompt_tokens": 10}, "kv_transfer_params": {"inferscale": {"x": 1}}}
    text = json.dumps(said).encode()
    sent = await passed(start(b"application/json"), body(text[:9], True), body(text[9:]))
    headers = dict(sent[0]["headers"])
    assert headers[b"x-inferscale-facts-requested"] == b"2" and headers[b"x-inferscale-handles-refused"] == b"1"
    assert int(headers[b"content-length"]) == len(sent[1]["body"])
    got = json.loads(sent[1]["body"])
    assert got["inferscale"] == {**REPORT.as_dict(), "tokens_prefilled": 8}
    assert got["choices"] == ["é"] and got["kv_transfer_params"] is None


async def test_in_a_stream_it_goes_with_the_usage_and_nothing_else_changes() -> None:
    first = body(b'data: {"choices":[{"delta":{"content":"\\"choices\\":[]"}}]}\n\n', True)
    usage = body(b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n', True)
    done = body(b"data: [DONE]\n\n")
    sent = await passed(start(b"text/event-stream; charset=utf-8"), first, usage, done)
    assert (sent[1], sent[3]) == (first, done)
    assert sent[2]["body"].startswith(b"data: {") and sent[2]["body"].endswith(b"}\n\n")
    assert json.loads(sent[2]["body"][6:])["inferscale"]["facts_injected"] == 1


async def test_what_is_no_answer_passes_as_it_is() -> None:
    """vLLM ends a request whose client has gone with null and status 200."""
    (_, sent) = await passed(start(b"application/json"), body(b"null"))
    assert sent["body"] == b"null"


async def test_errors_pass_as_they_are() -> None:
    sent = await passed(start(b"application/json", 400), body(b'{"e":1}'))
    assert sent[1]["body"] == b'{"e":1}' and dict(sent[0]["headers"])[b"content-length"] == b"7"


async def test_counts_alone() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    passed_on = counted(send, 2, 1)
    first, rest = start(b"application/json"), body(b'{"inferscale":1}')
    await passed_on(first)
    await passed_on(rest)
    assert sent == [with_counts(first, 2, 1), rest]
    assert dict(sent[0]["headers"])[b"x-inferscale-handles-refused"] == b"1"
