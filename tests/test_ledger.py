from __future__ import annotations

import pytest

from inferscale_mem.kv.directory import PAGE_SIZE
from inferscale_mem.recording.jobs import Job
from inferscale_mem.recording.ledger import Ledger
from inferscale_mem.types import PromptPlan, Segment


def record(handle: str) -> str:
    return f"record-{handle}"


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(record, attempts=3, backoff_s=1.0)


def encode(ledger: Ledger, handle: str, context: str = "") -> None:
    """Take the fact through the queue to a record."""
    ledger.want(Job(handle, age=float(ord(handle[0]))))
    while (flight := ledger.begin(0.0)) is not None:
        ledger.keep(flight, flight.job.age, context if flight.job.handle == handle else "")
        ledger.end()


def queued(ledger: Ledger) -> list[str]:
    handles = []
    while (flight := ledger.begin(0.0)) is not None:
        handles.append(flight.job.handle)
        ledger.end()
    return handles


def fact(handle: str, *, ready: bool = True, tokens: int = PAGE_SIZE) -> Segment:
    return Segment("fact", tuple(range(tokens)), record(handle) if ready else None, handle)


def test_ready_after_keep_and_no_longer_after_withdraw(ledger: Ledger) -> None:
    encode(ledger, "a")
    assert ledger.is_ready("record-a")
    assert ledger.withdraw(["a"]) == (["a"], [])
    assert not ledger.is_ready("record-a")


def test_withdraw_drops_everything_above_and_queues_it_again_oldest_first(ledger: Ledger) -> None:
    for handle, context in (("a", ""), ("b", "a"), ("d", "b"), ("c", "a"), ("x", "")):
        encode(ledger, handle, context)
    doomed, again = ledger.withdraw(["a"])
    assert doomed == ["a", "b", "c", "d"]
    assert not any(ledger.is_ready(record(handle)) for handle in "abcd")
    assert ledger.is_ready("record-x")
    ledger.dropped(doomed, again)
    assert queued(ledger) == ["b", "c", "d"]


def test_withdraw_cancels_what_is_queued(ledger: Ledger) -> None:
    ledger.want(Job("a"))
    ledger.want(Job("b"))
    ledger.withdraw(["a"])
    assert queued(ledger) == ["b"]


def test_an_encode_in_flight_is_spoiled_by_its_own_or_its_contexts_removal(ledger: Ledger) -> None:
    encode(ledger, "a")
    encode(ledger, "b", "a")
    ledger.want(Job("c"))
    flight = ledger.begin(0.0)
    assert flight is not None and not flight.spoiled("ab")
    ledger.withdraw(["a"])  # takes b with it
    assert flight.spoiled("a") and flight.spoiled("b") and not flight.spoiled("x") and not flight.dead
    ledger.withdraw(["c"])
    assert flight.spoiled("") and flight.dead


def test_redo_brings_back_the_living_only(ledger: Ledger) -> None:
    for handle, alive in (("a", True), ("b", False)):
        ledger.want(Job(handle))
        flight = ledger.begin(0.0)
        assert flight is not None
        if not alive:
            ledger.withdraw([handle])
        ledger.redo(flight)
        ledger.end()
        assert queued(ledger) == (["a"] if alive else [])


def test_what_was_made_again_before_the_engine_dropped_it_is_made_once_more(ledger: Ledger) -> None:
    encode(ledger, "a")
    encode(ledger, "b", "a")
    doomed, again = ledger.withdraw(["a"])
    encode(ledger, "b")
    ledger.dropped(doomed, again)
    assert not ledger.is_ready("record-b")
    assert queued(ledger) == ["b"]


def test_what_is_being_made_while_the_engine_drops_it_is_spoiled(ledger: Ledger) -> None:
    encode(ledger, "a")
    encode(ledger, "b", "a")
    doomed, again = ledger.withdraw(["a"])
    ledger.want(Job("b"))
    flight = ledger.begin(0.0)
    assert flight is not None and not flight.spoiled("")
    ledger.dropped(doomed, again)
    assert flight.spoiled("") and not flight.dead


def test_a_ready_fact_or_one_in_flight_is_not_queued_again(ledger: Ledger) -> None:
    encode(ledger, "a")
    ledger.want(Job("a"))
    ledger.want(Job("b"))
    assert ledger.begin(0.0) is not None
    ledger.want(Job("b"))
    assert len(ledger.queue) == 0
    ledger.want(Job("a"), known=True)
    assert len(ledger.queue) == 1


def test_a_fact_removed_in_flight_can_be_wanted_again(ledger: Ledger) -> None:
    ledger.want(Job("a"))
    ledger.begin(0.0)
    ledger.withdraw(["a"])
    ledger.want(Job("a"))
    assert "a" in ledger.queue


def test_failures_are_retried_later_and_later_and_then_given_up(ledger: Ledger) -> None:
    ledger.want(Job("a"))
    now, delays = 100.0, []
    while (flight := ledger.begin(now)) is not None:
        ledger.fail(flight, "broken", now)
        ledger.end()
        if (due := ledger.queue.rest_until()) is not None:
            delays.append(due - now)
            assert ledger.begin(due - 0.01) is None
            now = due
    assert delays == [1.0, 2.0]
    assert ledger.failures == {"a": "broken"}
    assert ledger.counters["failed"] == 3
    assert ledger.failure("a") == "broken" and ledger.failure("b") is None


def test_success_and_pardon_clear_failures(ledger: Ledger) -> None:
    for handle in ("a", "b"):
        ledger.want(Job(handle))
        flight = ledger.begin(0.0)
        assert flight is not None
        ledger.refuse(flight, "too big")
        ledger.end()
    encode(ledger, "a")
    assert ledger.failures == {"b": "too big"}
    ledger.pardon("b")
    assert ledger.failures == {}


def test_a_final_failure_is_never_retried_not_even_on_request(ledger: Ledger) -> None:
    ledger.want(Job("a"))
    flight = ledger.begin(0.0)
    assert flight is not None
    ledger.fail(flight, "too long", 0.0, final=True)
    ledger.end()
    ledger.want_asked(PromptPlan((fact("a", ready=False),)), lost=set(), room=None, since=ledger.moment)
    assert len(ledger.queue) == 0


def test_a_refused_fact_is_tried_when_asked_for_but_not_forever(ledger: Ledger) -> None:
    ledger.want(Job("a"))
    tries = 0
    for _ in range(10):
        if (flight := ledger.begin(0.0)) is not None:
            tries += 1
            ledger.refuse(flight, "budget")
            ledger.end()
        assert ledger.begin(1e9) is None
        ledger.want_asked(PromptPlan((fact("a", ready=False),)), lost=set(), room=None, since=ledger.moment)
    assert tries == 3


def test_failures_of_a_fact_that_was_removed_meanwhile_are_not_kept(ledger: Ledger) -> None:
    for verb in ("refuse", "fail"):
        ledger.want(Job("a"))
        flight = ledger.begin(0.0)
        assert flight is not None
        ledger.withdraw(["a"])
        ledger.refuse(flight, "budget") if verb == "refuse" else ledger.fail(flight, "broken", 0.0)
        ledger.end()
        assert ledger.failures == {}
        assert ledger.pending == 0


def test_evicted_records_are_queued_and_those_on_top_stay_ready(ledger: Ledger) -> None:
    encode(ledger, "a")
    encode(ledger, "b", "a")
    ledger.want_asked(PromptPlan((fact("a"), fact("b"))), lost={"a"}, room=None, since=ledger.moment)
    assert not ledger.is_ready("record-a") and ledger.is_ready("record-b")
    assert ledger.counters["evicted"] == 1
    assert queued(ledger) == ["a"]
    doomed, _ = ledger.withdraw(["a"])
    assert doomed == ["a", "b"], "b has still seen a"


def test_a_record_made_while_the_request_ran_is_not_taken_for_evicted(ledger: Ledger) -> None:
    encode(ledger, "a")
    since = ledger.moment
    encode(ledger, "b")
    ledger.want_asked(PromptPlan((fact("a"), fact("b"))), lost={"a", "b"}, room=None, since=since)
    assert not ledger.is_ready("record-a") and ledger.is_ready("record-b")
    assert queued(ledger) == ["a"]


def test_only_as_much_is_encoded_as_fits_beside_what_the_request_has(ledger: Ledger) -> None:
    for handle in "abcd":
        encode(ledger, handle)
    header = Segment("header", tuple(range(PAGE_SIZE)), "record-header")
    plan = PromptPlan((header, *(fact(handle) for handle in "abcd"), fact("e", ready=False), Segment("text", (1,))))
    ledger.want_asked(plan, lost={"a", "b", "c"}, room=4 * PAGE_SIZE, since=ledger.moment)
    assert not any(ledger.is_ready(record(handle)) for handle in "abc")
    assert sorted(queued(ledger)) == ["c", "e"], "the most similar come last"


def test_progress_counts_from_the_last_time_the_queue_was_empty(ledger: Ledger) -> None:
    assert str(ledger.progress) == "0 of 0 facts encoded"
    for handle in "abc":
        ledger.want(Job(handle))
    flight = ledger.begin(0.0)
    assert flight is not None and str(ledger.progress) == "0 of 3 facts encoded"
    ledger.keep(flight, 0.0, "")
    ledger.end()
    assert str(ledger.progress) == "1 of 3 facts encoded"
    queued(ledger)
    assert str(ledger.progress) == "3 of 3 facts encoded"
    ledger.want(Job("d"))
    assert str(ledger.progress) == "0 of 1 facts encoded"
