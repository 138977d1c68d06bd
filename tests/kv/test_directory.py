from __future__ import annotations

import pytest

from inferscale_mem.errors import BudgetError
from inferscale_mem.kv.directory import ABSENT, BEHIND, CHANGED, FOREIGN, FORGED, Directory, Record, Wanted
from inferscale_mem.types import Scope

ALICE, BOB = Scope(user_id="alice"), Scope(user_id="bob")


def make(num_pages: int = 4) -> Directory:
    return Directory(
        num_pages, page_size=8, page_bytes=100, verify=lambda handle, store, scope: handle.startswith("ok")
    )


def add(directory: Directory, name: str, length: int = 8, scope: Scope = ALICE) -> Record:
    record = directory.reserve(name, range(length), f"ok-{name}", scope, "store")
    directory.publish(record.generation)
    return record


def want(name: str, length: int = 8, handle: str | None = None) -> Wanted:
    return Wanted(tuple(range(length)), name, handle or f"ok-{name}")


def test_the_run_ends_at_the_first_gap() -> None:
    directory = make()
    add(directory, "a"), add(directory, "c")
    match = directory.match([want("a"), want("b"), want("c"), Wanted((1,), None, None)], ALICE, "store")
    assert ([r.name for r in match.records], match.length) == (["a"], 8)
    assert [(m.handle, m.reason) for m in match.missed] == [("ok-b", ABSENT), ("ok-c", BEHIND)]


@pytest.mark.parametrize(
    ("wanted", "scope", "store", "reason"),
    [
        (want("a", 7), ALICE, "store", CHANGED),
        (want("a"), BOB, "store", FOREIGN),
        (want("a"), None, "store", FOREIGN),
        (want("a"), ALICE, "other", FOREIGN),
        (want("a", handle="ok-b"), ALICE, "store", FORGED),
        (want("a", handle="ok-é"), ALICE, "store", FORGED),
        (want("a", handle="\ud800"), ALICE, "store", FORGED),
    ],
)
def test_only_the_right_one_gets_it(wanted: Wanted, scope: Scope | None, store: str, reason: str) -> None:
    directory = make()
    add(directory, "a")
    match = directory.match([wanted], scope, store)
    assert match.length == 0 and match.missed[0].reason == reason


def test_a_forged_tag_makes_no_record() -> None:
    with pytest.raises(BudgetError, match=FORGED):
        make().reserve("a", range(8), "forged", ALICE, "store")


def test_the_least_recently_used_go_but_not_the_pinned() -> None:
    directory = make(num_pages=3)
    a, b, _ = add(directory, "a"), add(directory, "b"), add(directory, "c")
    directory.pin([a])
    directory.unpin([a])  # used last
    directory.pin([b])
    add(directory, "d")
    present = {name for name in "abcd" if directory.match([want(name)], ALICE, "store").length}
    assert present == {"a", "b", "d"}
    directory.pin([a])
    with pytest.raises(BudgetError, match="in use"):
        directory.reserve("e", range(16), "ok-e", ALICE, "store")


def test_more_than_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match="500 bytes, the budget is 400"):
        make().reserve("a", range(33), "ok-a", ALICE, "store")


def test_pages_of_dropped_records_are_erased_once_nobody_reads_them() -> None:
    directory = make()
    a, b = add(directory, "a", 16), add(directory, "b")
    directory.pin([a])
    pages = set(a.pages)
    assert directory.drop(["ok-a"]) == 1
    assert directory.match([want("a", 16)], ALICE, "store").length == 0
    assert directory.take_erased() == [] and directory.bytes == 300
    directory.unpin([a])
    assert set(directory.take_erased()) == pages and directory.take_erased() == []
    assert directory.bytes == 100 and b.ready


def test_what_is_dropped_while_it_is_encoded_never_appears() -> None:
    directory = make()
    record = directory.reserve("a", range(8), "ok-a", ALICE, "store")
    assert directory.drop(["ok-a"]) == 1
    directory.publish(record.generation)
    assert directory.records == 0 and directory.bytes == 0


def test_evicted_pages_are_not_erased() -> None:
    directory = make(num_pages=1)
    add(directory, "a"), add(directory, "b")
    assert directory.take_erased() == [] and directory.counters["evicted"] == 1
