from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_mem import wire
from inferscale_mem.errors import InputError
from inferscale_mem.types import EncodePlan, Miss, PromptPlan, Scope, Segment, Span

OWNER = Scope(user_id="alice", run_id="1")
SEGMENTS = (Segment("header", (1, 2, 3), "h"), Segment("fact", (4, 5), "f", "ism1.a.b"), Segment("text", (6,)))


def test_a_prompt_plan_arrives_as_it_was_sent() -> None:
    sent = json.loads(json.dumps(wire.inject_params(PromptPlan(SEGMENTS, OWNER, "store"))))
    order = wire.parse(sent, 6)
    assert order is not None and (order.op, order.scope, order.store) == ("inject", OWNER, "store")
    assert [(s.length, s.record, s.handle) for s in order.segments] == [
        (3, "h", None),
        (2, "f", "ism1.a.b"),
        (1, None, None),
    ]


def test_an_encode_plan_arrives_as_it_was_sent() -> None:
    spans = (Span("f", 3, 5, "ism1.a.b", OWNER),)
    order = wire.parse(json.loads(json.dumps(wire.encode_params(EncodePlan(SEGMENTS, spans, OWNER, "store")))), 6)
    assert order is not None and order.spans == spans


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, "text"])
def test_requests_of_others_are_left_alone(params: Any) -> None:
    assert wire.parse(params, 6) is None


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {"v": 2, "op": "inject"},
        {"v": 1, "op": "steal"},
        {"v": 1},
        {"v": 1, "op": "inject", "segments": [[7, "r", None]]},
        {"v": 1, "op": "inject", "segments": [[-1, "r", None]]},
        {"v": 1, "op": "inject", "segments": [[True, "r", None]]},
        {"v": 1, "op": "inject", "segments": [["1", "r", None]]},
        {"v": 1, "op": "inject", "segments": [[1, 5, None]]},
        {"v": 1, "op": "inject", "segments": 5},
        {"v": 1, "op": "inject", "scope": {"user_id": "*"}},
        {"v": 1, "op": "inject", "scope": {"nobody": 1}},
        {"v": 1, "op": "encode", "spans": [{"record": "r", "start": 2, "end": 2}]},
        {"v": 1, "op": "encode", "spans": [{"record": "r", "start": 0, "end": 7}]},
        {
            "v": 1,
            "op": "encode",
            "spans": [{"record": "r", "start": 0, "end": 4}, {"record": "s", "start": 3, "end": 5}],
        },
        {"v": 1, "op": "encode", "spans": [{"start": 0, "end": 4}]},
    ],
)
def test_malformed_orders_are_named(given: Any) -> None:
    with pytest.raises(InputError):
        wire.parse({wire.KEY: given}, 6)


def test_without_an_answer_every_memory_is_missed() -> None:
    plan = PromptPlan(SEGMENTS, OWNER, "store")
    for answer, reason in ((None, wire.NO_CONNECTOR), ({"error": "no"}, "no")):
        report = wire.inject_report(plan, answer, 1.0)
        assert (report.facts_requested, report.facts_injected, report.tokens_prefilled) == (1, 0, 6)
        assert report.missed == (Miss("ism1.a.b", reason),)


KEY = bytes(range(32))


def sent(token_ids: list[int] | None = None, key: bytes = KEY) -> Any:
    """An order as it comes over a network."""
    params = wire.inject_params(PromptPlan(SEGMENTS, OWNER, "store"))
    return json.loads(json.dumps(wire.sign(params, token_ids or [1, 2, 3, 4, 5, 6], key)))


def test_a_signed_order_is_known_and_can_be_read() -> None:
    assert wire.is_signed(sent(), [1, 2, 3, 4, 5, 6], KEY)
    assert wire.parse(sent(), 6) == wire.parse(wire.inject_params(PromptPlan(SEGMENTS, OWNER, "store")), 6)
    assert wire.sign({"other": 1}, [1], KEY) == {"other": 1}


def test_another_prompt_key_or_order_is_not_signed() -> None:
    assert not wire.is_signed(sent(), [1, 2, 3, 4, 5, 7], KEY)
    assert not wire.is_signed(sent(), [1, 2, 3, 4, 5], KEY)
    assert not wire.is_signed(sent(key=bytes(32)), [1, 2, 3, 4, 5, 6], KEY)
    for name, value in {"op": "drop", "scope": {"user_id": "bob"}, "store": "", "segments": [], "more": 1}.items():
        changed = sent()
        changed[wire.KEY][name] = value
        assert not wire.is_signed(changed, [1, 2, 3, 4, 5, 6], KEY), name


def deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "order",
    [
        *(None, [], "text", 3, {}),
        *({"signature": value} for value in (None, 3, [], "", "é", "\ud800", "0" * 64)),
        {"signature": "0" * 64, "deep": deep(100_000)},
        {"signature": "0" * 64, 1: "a", "b": 2},
        {"signature": "0" * 64, "object": object()},
        {"signature": "0" * 64, "nan": float("nan"), "\ud800": "\ud800"},
    ],
)
def test_nothing_a_stranger_sends_passes_or_raises(order: Any) -> None:
    assert not wire.is_signed({wire.KEY: order}, [1], KEY)
    assert not wire.is_signed({wire.KEY: order}, [1 << 70], KEY)
