from __future__ import annotations

import dataclasses

from inferscale_mem import wire
from inferscale_mem.handles import ENDLESS, EXPIRED, UNKNOWN, HandleSigner
from inferscale_mem.kv.directory import ABSENT, BEHIND
from inferscale_mem.remote import Announcement
from inferscale_mem.server.facts import FactTable, Known
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
    assert table.announce(said("tea")).missing == (handle("tea"),)
    known = table.get(handle("tea"))
    assert isinstance(known, Known) and (known.fact, known.store, known.fingerprint, known.text_tail) == (
        fact("tea"),
        "store",
        "print",
        2,
    )
    assert table.get(handle("tea")[:-1] + "0") == UNKNOWN or handle("tea")[-1] == "0"
    assert table.get(handle("rain")) == table.get("tea") == UNKNOWN


def test_how_much_is_left_to_prefill_travels_along() -> None:
    table = FactTable(KEY)
    sent = dataclasses.replace(said("tea"), free_tokens=64)
    table.announce(Announcement.from_bytes(sent.to_bytes()))
    known = table.get(handle("tea"))
    assert isinstance(known, Known) and (known.text_tail, known.free_tokens) == (2, 64)


def test_a_handle_that_is_not_genuine_is_left_out() -> None:
    table = FactTable(KEY)
    bobs = dataclasses.replace(fact("tea"), scope=Scope(user_id="bob"))
    assert table.announce(Announcement("store", "print", 0, {handle("tea"): bobs})).missing == ()
    assert table.announce(dataclasses.replace(said("tea"), store="other")).missing == ()
    assert table.get(handle("tea")) == UNKNOWN


def test_records_come_and_go_with_what_the_connector_says() -> None:
    table = FactTable(KEY)
    table.announce(said("tea", "rain"))
    encode(table, "tea")
    assert table.is_ready(record("tea")) and not table.is_ready(record("rain"))
    assert table.announce(said("tea", "rain")).missing == (handle("rain"),)
    table.note(wire.status_params(), {"missed": [[handle("tea"), BEHIND]]})
    assert table.is_ready(record("tea"))
    table.note(wire.status_params(), {"missed": [[handle("tea"), ABSENT]]})
    assert table.announce(said("tea")).missing == (handle("tea"),)


def test_what_the_connector_refused_is_not_believed() -> None:
    table = FactTable(KEY)
    encode(table, "tea", {"error": wire.UNSIGNED})
    encode(table, "tea", {"encoded": []})
    assert not table.is_ready(record("tea"))
    encode(table, "tea")
    table.announce(said("tea"))
    table.note(wire.drop_params([handle("tea")]), {"error": wire.UNSIGNED})
    table.note(wire.drop_params([handle("tea")]), None)
    assert isinstance(table.get(handle("tea")), Known) and table.is_ready(record("tea"))


def test_dropped_is_unknown() -> None:
    table = FactTable(KEY)
    table.announce(said("tea"))
    encode(table, "tea")
    table.note(wire.drop_params([handle("tea"), "self-test.rope"]), {})
    assert table.get(handle("tea")) == UNKNOWN and not table.is_ready(record("tea"))


def test_what_only_lost_its_record_stays_known() -> None:
    table = FactTable(KEY)
    table.announce(said("tea", "rain"))
    encode(table, "tea")
    encode(table, "rain")
    table.note(wire.drop_params([handle("tea"), handle("rain")], alive=[handle("rain")]), {})
    assert table.get(handle("tea")) == UNKNOWN
    assert isinstance(table.get(handle("rain")), Known) and not table.is_ready(record("rain"))
    assert table.announce(said("rain")).missing == (handle("rain"),)


def test_what_is_gone_is_not_taken_from_whoever_may_not_know() -> None:
    table = FactTable(KEY)
    before = table.announce(said("tea"))
    table.note(wire.drop_params([handle("tea")]), {})
    late = table.announce(dataclasses.replace(said("tea", "rain"), moment=before.moment))
    assert (late.missing, late.gone) == ((handle("rain"),), (handle("tea"),))
    assert table.get(handle("tea")) == UNKNOWN
    table.note(wire.drop_params([handle("tea")]), {})  # once more, after the announcer looked
    knowing = dataclasses.replace(said("tea"), moment=late.moment)
    assert table.announce(knowing).gone == (handle("tea"),)
    last = table.announce(said("rain")).moment
    again = table.announce(Announcement.from_bytes(dataclasses.replace(knowing, moment=last).to_bytes()))
    assert again.gone == () and isinstance(table.get(handle("tea")), Known)


def test_not_every_drop_is_remembered_forever() -> None:
    table = FactTable(KEY, most=2)
    table.note(wire.drop_params([handle(name) for name in "abc"]), {})
    assert table.announce(said("a", "b", "c")).gone == (handle("b"), handle("c"))


def test_a_drop_counts_more_than_one_before_a_restart() -> None:
    table, after = FactTable(KEY), FactTable(KEY)
    table.note(wire.drop_params([handle(name) for name in "abc"]), {})
    heard = table.announce(said("a")).moment
    after.note(wire.drop_params([handle("a")]), {})
    assert after.announce(dataclasses.replace(said("a"), moment=heard)).gone == (handle("a"),)


def test_those_announced_longest_ago_go_first() -> None:
    table = FactTable(KEY, most=2)
    table.announce(said("a", "b"))
    table.announce(said("a"))
    table.announce(said("c"))
    assert [isinstance(table.get(handle(name)), Known) for name in "abc"] == [True, False, True]
    assert set(table._named) == {SIGNER.handle_id(fact(name)) for name in "ac"}


def test_a_strict_memorys_facts_are_known_by_handles_that_expire() -> None:
    table = FactTable(KEY, clock=lambda: 1060.0)
    fresh, old = (HandleSigner(KEY, "store", after, lambda: 1000.0).issue(fact("tea")) for after in (61, 60))
    assert table.get(fresh) == UNKNOWN
    table.announce(Announcement.from_bytes(dataclasses.replace(said("tea"), strict=True).to_bytes()))
    known = table.get(fresh)
    assert isinstance(known, Known) and (known.fact, known.handle) == (fact("tea"), handle("tea"))
    assert table.get(old) == EXPIRED and table.get(handle("tea")) == ENDLESS
    assert table.get(fresh[:-1] + ("0" if fresh[-1] != "0" else "1")) == UNKNOWN
    assert table.get(old.replace(".0000001060.", ".0000009999.")) == UNKNOWN
    table.note(wire.drop_params([handle("tea")]), {})
    assert table.get(fresh) == UNKNOWN


def test_who_announces_last_says_whether_handles_must_expire() -> None:
    table = FactTable(KEY, clock=lambda: 1060.0)
    table.announce(dataclasses.replace(said("tea"), strict=True))
    table.announce(said("tea", "rain"))
    fresh, old = (HandleSigner(KEY, "store", after, lambda: 1000.0).issue(fact("tea")) for after in (61, 60))
    assert isinstance(table.get(handle("tea")), Known) and isinstance(table.get(fresh), Known)
    assert table.get(old) == EXPIRED, "whoever made it wanted it to end"
    table.announce(dataclasses.replace(said("rain"), strict=True))
    assert table.get(handle("tea")) == table.get(handle("rain")) == ENDLESS, "of the whole store"


def test_the_same_fact_in_two_stores() -> None:
    table = FactTable(KEY)
    other = HandleSigner(KEY, "other").mint(fact("tea"))
    table.announce(said("tea"))
    table.announce(Announcement("other", "print", 0, {other: fact("tea")}))
    assert [found.store for found in map(table.get, (handle("tea"), other)) if isinstance(found, Known)] == [
        "store",
        "other",
    ]
    table.note(wire.drop_params([other]), {})
    assert table.get(other) == UNKNOWN and isinstance(table.get(handle("tea")), Known)
