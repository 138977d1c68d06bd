from __future__ import annotations

import dataclasses

from inferscale_mem import wire
from inferscale_mem.handles import HandleSigner
from inferscale_mem.kv.directory import ABSENT, BEHIND
from inferscale_mem.remote import Announcement
from inferscale_mem.server.facts import FactTable
from inferscale_mem.types import EncodePlan, Fact, Scope, Segment, Span

KEY = bytes(range(32))
SIGNER = HandleSigner(KEY, "store")
ALICE = Scope(user_id="alice")


def fact(name: str) -> Fact:
    return Fact(name, f"likes {name}", ALICE, "1")


def said(*names: str) -> Announcement:
    return Announcement("store", "print", 2, {SIGNER.mint(fact(name)): fact(name) for name in names})


def handle(name: str) -> str:
    return SIGNER.mint(fact(name))


def record(name: str) -> str:
    return f"{SIGNER.handle_id(fact(name))}.print"


def encode(table: FactTable, name: str, answer: dict[str, object] | None = None) -> None:
    span = Span(record(name), 0, 2, handle(name), ALICE)
    plan = EncodePlan((Segment("text", (1, 2)),), (span,), ALICE, "store")
    table.note(wire.encode_params(plan), {"encoded": [record(name)]} if answer is None else answer)


def test_a_fact_is_known_by_its_very_handle() -> None:
    table = FactTable(KEY)
    assert table.announce(said("tea")) == [handle("tea")]
    known = table.get(handle("tea"))
    assert known is not None and (known.fact, known.store, known.fingerprint, known.text_tail) == (
        fact("tea"),
        "store",
        "print",
        2,
    )
    assert table.get(handle("tea")[:-1] + "0") is None or handle("tea")[-1] == "0"


def test_how_much_is_left_to_prefill_travels_along() -> None:
    table = FactTable(KEY)
    sent = dataclasses.replace(said("tea"), free_tokens=64)
    table.announce(Announcement.from_bytes(sent.to_bytes()))
    known = table.get(handle("tea"))
    assert known is not None and (known.text_tail, known.free_tokens) == (2, 64)


def test_a_handle_that_is_not_genuine_is_left_out() -> None:
    table = FactTable(KEY)
    bobs = dataclasses.replace(fact("tea"), scope=Scope(user_id="bob"))
    assert table.announce(Announcement("store", "print", 0, {handle("tea"): bobs})) == []
    assert table.announce(dataclasses.replace(said("tea"), store="other")) == []
    assert table.get(handle("tea")) is None


def test_records_come_and_go_with_what_the_connector_says() -> None:
    table = FactTable(KEY)
    table.announce(said("tea", "rain"))
    encode(table, "tea")
    assert table.is_ready(record("tea")) and not table.is_ready(record("rain"))
    assert table.announce(said("tea", "rain")) == [handle("rain")]
    table.note(wire.status_params(), {"missed": [[handle("tea"), BEHIND]]})
    assert table.is_ready(record("tea"))
    table.note(wire.status_params(), {"missed": [[handle("tea"), ABSENT]]})
    assert table.announce(said("tea")) == [handle("tea")]


def test_what_the_connector_refused_is_not_believed() -> None:
    table = FactTable(KEY)
    encode(table, "tea", {"error": wire.UNSIGNED})
    encode(table, "tea", {"encoded": []})
    assert not table.is_ready(record("tea"))
    encode(table, "tea")
    table.announce(said("tea"))
    table.note(wire.drop_params([handle("tea")]), {"error": wire.UNSIGNED})
    table.note(wire.drop_params([handle("tea")]), None)
    assert table.get(handle("tea")) is not None and table.is_ready(record("tea"))


def test_dropped_is_unknown() -> None:
    table = FactTable(KEY)
    table.announce(said("tea"))
    encode(table, "tea")
    table.note(wire.drop_params([handle("tea"), "self-test.rope"]), {})
    assert table.get(handle("tea")) is None and not table.is_ready(record("tea"))


def test_those_announced_longest_ago_go_first() -> None:
    table = FactTable(KEY, most=2)
    table.announce(said("a", "b"))
    table.announce(said("a"))
    table.announce(said("c"))
    assert [table.get(handle(name)) is not None for name in "abc"] == [True, False, True]
