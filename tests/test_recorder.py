from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gated_engine import PATIENCE, until
from recorder_helpers import ALICE, BOB, KEY, Recording, forged, new_fact, report

from inferscale_mem.errors import EngineAwayError, EngineClosedError, EngineError, HandleError, StoreError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.kv.directory import ABSENT, BEHIND, CHANGED
from inferscale_mem.recording.owed import OwedDrops
from inferscale_mem.types import EncodePlan, Fact


@pytest.fixture
def scene() -> Iterator[Recording]:
    made = Recording()
    yield made
    made.close()


def failing(handle: str, error: Exception, times: int = 10**6) -> Callable[[EncodePlan], None]:
    """Raises in the encodes of one fact."""
    left = [times]

    def fail(plan: EncodePlan) -> None:
        if any(span.handle == handle for span in plan.spans) and left[0] > 0:
            left[0] -= 1
            raise error

    return fail


# Adding.


def test_add_returns_before_anything_is_encoded(scene: Recording) -> None:
    scene.engine.encodes.shut()
    facts = [new_fact() for _ in range(3)]
    scene.add(*facts)
    assert scene.recorder.pending == 3
    assert not any(scene.ready(*facts))
    scene.engine.encodes.open()
    scene.settle()
    assert all(scene.ready(*facts)) and all(scene.held(*facts))
    assert scene.recorder.pending == 0
    assert str(scene.recorder.progress) == "3 of 3 facts encoded"


def test_a_batch_is_encoded_oldest_first_behind_the_header_and_chained(scene: Recording) -> None:
    facts = [new_fact() for _ in range(4)]
    scene.index.put(*facts)
    scene.recorder.add(reversed(facts))
    scene.settle()
    assert scene.engine.encoded == scene.handles(*facts)
    assert scene.engine.headers == [scene.planner.default_header().record]
    own = sum(len(scene.planner.fact_tokens(fact.text)) for fact in facts)
    assert scene.recorder.counters["tokens_prefilled"] == own, "everything else came from records"


def test_adding_what_is_ready_encodes_nothing(scene: Recording) -> None:
    fact = new_fact()
    for _ in range(2):
        scene.add(fact)
        scene.settle()
    assert scene.engine.encoded == [scene.handle(fact)]


def test_a_fact_that_the_index_does_not_have_is_skipped(scene: Recording) -> None:
    gone, updated, kept = new_fact(), new_fact(), new_fact()
    scene.index.put(kept, replace(updated, revision="2"))
    scene.recorder.add([gone, updated, kept])
    scene.settle()
    assert scene.ready(gone, updated, kept) == [False, False, True]
    assert scene.recorder.counters["skipped"] == 2
    assert scene.recorder.failures == {}


def test_records_that_an_earlier_recorder_left_in_the_engine_are_replaced(scene: Recording) -> None:
    facts = [new_fact(), new_fact()]
    scene.add(*facts)
    scene.settle()
    scene.recorder.close()
    scene.recorder = scene.new_recorder()
    scene.recorder.rebuild()
    scene.settle()
    assert all(scene.ready(*facts)) and scene.recorder.failures == {}
    for plan in scene.engine.plans:
        made = {span.record for span in plan.spans}
        assert not made & {segment.record for segment in plan.segments}, "what is made is not asked for as context"


def test_without_a_connector_nothing_is_encoded() -> None:
    scene = Recording(connector=False)
    fact = new_fact()
    scene.add(fact)
    scene.recorder.rebuild()
    scene.recorder.observe(report({scene.handle(fact): ABSENT}), scene.plan(fact))
    scene.remove(fact)
    assert scene.recorder.pending == 0
    assert scene.recorder.ensure_headers([scene.planner.default_header()]) == 0
    assert scene.engine.plans == [] and scene.engine.dropped_handles == []
    scene.close()


# Removing.


def test_a_removed_fact_is_not_ready_and_its_bytes_are_gone(scene: Recording) -> None:
    fact, other = new_fact(), new_fact(scope=BOB)
    scene.add(fact, other)
    scene.settle()
    scene.remove(fact)
    assert scene.ready(fact, other) == [False, True]
    scene.settle()
    assert scene.held(fact) == [False]
    assert scene.engine.encoded == scene.handles(fact, other), "nothing was encoded again"


def test_a_removed_fact_is_not_ready_even_before_the_engine_has_dropped_it(scene: Recording) -> None:
    fact = new_fact()
    scene.add(fact)
    scene.settle()
    scene.engine.drops.shut()
    thread = threading.Thread(target=scene.remove, args=(fact,))
    thread.start()
    scene.engine.drops.arrival()
    assert scene.ready(fact) == [False]
    scene.engine.drops.open()
    thread.join(PATIENCE)


def test_removing_what_is_queued_cancels_it(scene: Recording) -> None:
    scene.engine.encodes.shut()
    first, second = new_fact(), new_fact()
    scene.add(first, second)
    scene.engine.encodes.arrival()
    scene.remove(second)
    scene.engine.encodes.open()
    scene.settle()
    assert scene.engine.encoded == [scene.handle(first)]


def test_removing_what_is_in_flight_does_not_bring_it_back(scene: Recording) -> None:
    scene.add(new_fact())  # makes the header, too
    scene.settle()
    scene.engine.encodes.shut()
    late = new_fact()
    scene.add(late)
    scene.engine.encodes.arrival()
    scene.remove(late)
    scene.engine.encodes.open()
    scene.settle()
    assert scene.ready(late) == [False] and scene.held(late) == [False]
    assert scene.engine.encoded.count(scene.handle(late)) == 1
    assert scene.engine.dropped_handles.count(scene.handle(late)) == 2, "once at once, once after it ended"


def test_everything_on_top_of_a_removed_fact_is_made_again(scene: Recording) -> None:
    first, second, third, other = new_fact(), new_fact(), new_fact(), new_fact(scope=BOB)
    scene.add(first, second, third, other)
    scene.settle()
    scene.remove(first)
    assert scene.ready(other) == [True]
    scene.settle()
    assert scene.ready(first, second, third) == [False, True, True]
    assert scene.engine.encoded[4:] == scene.handles(second, third), "oldest first, and only those"
    for plan in scene.engine.plans[-2:]:
        assert scene.handle(first) not in [segment.handle for segment in plan.segments]
    assert set(scene.engine.dropped_handles) == set(scene.handles(first, second, third))


def test_what_has_to_be_made_again_does_not_hold_up_new_facts(scene: Recording) -> None:
    first, second, third = new_fact(), new_fact(), new_fact()
    scene.add(first, second, third)
    scene.settle()
    scene.engine.encodes.shut()
    blocker, new = new_fact(scope=BOB), new_fact(scope=BOB)
    scene.add(blocker)
    scene.engine.encodes.arrival()
    scene.remove(first)
    scene.add(new)
    scene.engine.encodes.open()
    scene.settle()
    assert scene.engine.encoded[3:] == scene.handles(blocker, new, second, third)


def test_dependence_goes_through_records_that_have_not_seen_the_fact_themselves() -> None:
    scene = Recording("fact_chain(1, previous)")
    facts = [new_fact() for _ in range(4)]
    scene.add(*facts)
    scene.settle()
    scene.remove(facts[0])
    scene.settle()
    assert scene.engine.encoded[4:] == scene.handles(*facts[1:])
    scene.close()


def test_context_that_was_prefilled_as_text_counts_as_seen() -> None:
    scene = Recording("fact_window(8)")
    first, second = new_fact(), new_fact()
    scene.add(first, second)
    scene.settle()
    scene.remove(first)
    scene.settle()
    assert scene.engine.encoded == [*scene.handles(first, second), scene.handle(second)]
    scene.close()


def test_an_encode_on_top_of_a_fact_that_is_removed_meanwhile_is_thrown_away(scene: Recording) -> None:
    first, second = new_fact(), new_fact()
    scene.add(first)
    scene.settle()
    scene.engine.encodes.shut()
    scene.add(second)
    scene.engine.encodes.arrival()
    scene.remove(first)
    assert scene.ready(second) == [False]
    scene.engine.encodes.open()
    scene.settle()
    assert scene.ready(second) == [True]
    assert scene.engine.encoded == scene.handles(first, second, second)
    assert scene.handle(first) not in [segment.handle for segment in scene.engine.plans[-1].segments]
    assert scene.recorder.counters["spoiled"] == 1


def test_a_record_that_was_made_again_too_early_is_made_once_more(scene: Recording) -> None:
    """Removal takes `second` with it; a request has it encoded again before the engine's drop comes through."""
    first, second = new_fact(), new_fact()
    scene.add(first, second)
    scene.settle()
    scene.engine.drops.shut()
    thread = threading.Thread(target=scene.remove, args=(first,))
    thread.start()
    scene.engine.drops.arrival()
    scene.recorder.add([second])
    scene.settle()
    assert scene.ready(second) == [True]
    scene.engine.drops.open()
    thread.join(PATIENCE)
    scene.settle()
    assert scene.ready(second) == [True] and scene.held(second) == [True]


def test_an_update_while_queued_encodes_the_new_revision_only(scene: Recording) -> None:
    scene.engine.encodes.shut()
    blocker, old = new_fact(), new_fact("Her favourite player is Ronaldo.")
    scene.add(blocker, old)
    scene.engine.encodes.arrival()
    new = replace(old, text="Her favourite player is Messi.", revision="2")
    scene.index.put(new)
    scene.recorder.remove([old])
    scene.recorder.add([new])
    scene.engine.encodes.open()
    scene.settle()
    assert scene.ready(old, new) == [False, True]
    assert scene.handle(old) not in scene.engine.encoded


def test_an_update_reencodes_what_had_seen_the_old_revision(scene: Recording) -> None:
    old, above = new_fact("Her favourite player is Ronaldo."), new_fact()
    scene.add(old, above)
    scene.settle()
    new = replace(old, text="Her favourite player is Messi.", revision="2")
    scene.index.put(new)
    scene.recorder.remove([old])
    scene.recorder.add([new])
    scene.settle()
    assert scene.ready(old, new, above) == [False, True, True]
    last = [plan for plan in scene.engine.plans if plan.spans[0].handle == scene.handle(above)][-1]
    seen = [segment.handle for segment in last.segments]
    assert scene.handle(new) in seen and scene.handle(old) not in seen


def test_handles_can_be_removed_as_well_as_facts(scene: Recording) -> None:
    fact = new_fact()
    scene.add(fact)
    scene.settle()
    scene.index.take(fact)
    scene.recorder.remove([scene.handle(fact), scene.handle(fact)])
    assert scene.ready(fact) == [False] and scene.engine.dropped_handles == [scene.handle(fact)]
    scene.recorder.remove([])
    for wrong in ("no handle", HandleSigner(KEY, "tests", expire_after_s=60).issue(fact)):
        with pytest.raises(HandleError, match="names no record"):
            scene.recorder.remove([wrong])


def test_an_engine_that_fails_to_drop_is_heard_and_the_fact_stays_not_ready(scene: Recording) -> None:
    first, second = new_fact(), new_fact()
    scene.add(first, second)
    scene.settle()

    def broken(handles: object, alive: object = ()) -> None:
        raise EngineError("no answer")

    drop, scene.engine.inner.drop = scene.engine.inner.drop, broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no answer"):
        scene.remove(first)
    scene.engine.inner.drop = drop  # type: ignore[method-assign]
    scene.settle()
    assert scene.ready(first, second) == [False, True]


@pytest.mark.parametrize(
    "form",
    [
        lambda scene, fact: scene.handle(fact),
        lambda scene, fact: HandleSigner(KEY, "tests", expire_after_s=60).issue(fact),
        lambda scene, fact: forged(scene.handle(fact)),  # its tag cannot be checked: the owner is gone with the fact
    ],
)
def test_recheck_drops_what_the_index_no_longer_has_and_what_stood_on_it(scene: Recording, form: Any) -> None:
    expired, above = new_fact(), new_fact()
    scene.add(expired, above)
    scene.settle()
    scene.index.take(expired)
    scene.recorder.recheck([scene.handle(new_fact())])
    scene.settle()
    assert scene.ready(expired, above) == [True, True]
    scene.recorder.recheck([form(scene, expired)])
    scene.settle()
    assert scene.ready(expired, above) == [False, True] and scene.held(expired) == [False]
    assert scene.engine.encoded == scene.handles(expired, above, above)


# What requests tell.


def test_evicted_records_are_made_again_when_a_request_misses_them(scene: Recording) -> None:
    facts = [new_fact(), new_fact()]
    scene.add(*facts)
    scene.settle()
    scene.fake.evict_all()
    assert scene.ready(*facts) == [True, True], "nobody has told yet"
    scene.recorder.observe(scene.ask(*facts), scene.plan(*facts))
    scene.settle()
    assert scene.recorder.counters["evicted"] == 2
    assert scene.ask(*facts).facts_injected == 2, "the header was evicted and is there again, too"


def test_only_absent_and_changed_records_are_taken_for_lost(scene: Recording) -> None:
    absent, changed, behind = facts = [new_fact(), new_fact(), new_fact()]
    scene.add(*facts)
    scene.settle()
    scene.engine.encodes.shut()
    told = report(dict(zip(scene.handles(*facts), (ABSENT, CHANGED, BEHIND), strict=True)))
    scene.recorder.observe(told, scene.plan(*facts))
    assert scene.ready(absent, changed, behind) == [False, False, True]
    scene.engine.encodes.open()


def test_a_fact_nobody_ever_queued_is_encoded_when_it_is_asked_for(scene: Recording) -> None:
    fact = new_fact()
    scene.index.put(fact)
    scene.recorder.observe(scene.ask(fact), scene.plan(fact))
    scene.settle()
    assert scene.ready(fact) == [True]


def test_a_request_larger_than_the_budget_does_not_make_its_records_push_each_other_out() -> None:
    scene = Recording("alone", record_bytes=64 * 120)
    facts = [new_fact("x" * 37) for _ in range(5)]  # 40 tokens each, with bullet and line break: three fit
    scene.index.put(*facts)
    for _ in range(4):
        scene.recorder.observe(scene.ask(*facts), scene.plan(*facts, header=False))
        scene.settle()
    assert scene.ready(*facts) == [False, False, True, True, True]
    assert len(scene.engine.encoded) == 3
    scene.close()


# When things go wrong.


def test_an_engine_error_is_kept_and_retried(scene: Recording) -> None:
    fact, other = new_fact(), new_fact()
    scene.engine.fail = failing(scene.handle(fact), EngineError("hiccup"), times=2)
    scene.add(fact, other)
    scene.settle()
    assert scene.ready(fact, other) == [True, True]
    assert scene.recorder.failures == {} and scene.recorder.counters["failed"] == 2


def test_a_fact_that_keeps_failing_is_given_up_until_it_is_added_again(
    scene: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    fact, other = new_fact(), new_fact()
    scene.engine.fail = failing(scene.handle(fact), EngineError("broken"))
    scene.add(fact, other)
    scene.settle()
    assert scene.ready(fact, other) == [False, True]
    assert scene.recorder.failures == {scene.handle(fact): "EngineError: broken"}
    assert scene.recorder.failure(scene.handle(fact)) == "EngineError: broken"
    assert scene.engine.encoded.count(scene.handle(fact)) == 3
    assert [r.levelno for r in caplog.records if "broken" in r.message] == [logging.WARNING]
    scene.engine.fail = failing(scene.handle(fact), EngineError("broken"), times=2)
    scene.recorder.observe(scene.ask(fact), scene.plan(fact))
    scene.settle()
    assert scene.ready(fact) == [False], "requests do not revive what has been given up"
    scene.recorder.add([fact])
    scene.settle()
    assert scene.ready(fact) == [True] and scene.recorder.failures == {}


def test_a_retry_waits_for_its_time_and_does_not_hold_up_others(scene: Recording) -> None:
    scene.recorder = scene.new_recorder(backoff_s=3600.0)
    fact, other = new_fact(), new_fact()
    scene.engine.fail = failing(scene.handle(fact), EngineError("hiccup"), times=1)
    scene.add(fact, other)
    until(lambda: all(scene.ready(other)))
    assert scene.recorder.pending == 1 and not scene.recorder.wait(0.0)
    scene.recorder.add([fact])
    scene.settle()
    assert scene.ready(fact) == [True], "whoever adds it again need not wait"


def test_an_error_of_the_index_does_not_end_the_thread(scene: Recording) -> None:
    get, calls = scene.index.get, []

    def flaky(fact_id: str) -> Fact | None:
        calls.append(fact_id)
        if len(calls) == 1:
            raise IndexError("embedded store under load")
        return get(fact_id)

    scene.index.get = flaky  # type: ignore[method-assign]
    fact = new_fact()
    scene.add(fact)
    scene.settle()
    assert scene.ready(fact) == [True] and scene.recorder.counters["failed"] == 1


def test_a_refused_fact_is_not_tried_in_a_loop_and_its_reason_is_kept(scene: Recording) -> None:
    fact, other = new_fact(), new_fact()
    scene.engine.refuse = lambda plan: "over budget" if plan.spans[0].handle == scene.handle(fact) else None
    scene.add(fact, other)
    scene.settle()
    assert scene.ready(fact, other) == [False, True]
    assert scene.recorder.failures == {scene.handle(fact): "over budget"}
    assert scene.engine.encoded.count(scene.handle(fact)) == 1
    for _ in range(5):
        scene.recorder.observe(scene.ask(fact), scene.plan(fact))
        scene.settle()
    assert scene.engine.encoded.count(scene.handle(fact)) == 3


def test_a_budget_smaller_than_a_fact_ends_in_failures_not_in_a_loop() -> None:
    scene = Recording("alone", record_bytes=64 * 16)
    fact = new_fact("much longer than sixteen bytes")
    scene.add(fact)
    scene.settle()
    assert scene.ready(fact) == [False]
    assert "raise engine.record_bytes" in scene.recorder.failures[scene.handle(fact)]
    scene.close()


def test_a_fact_too_long_for_the_model_is_final() -> None:
    scene = Recording(max_model_len=200)
    fact = new_fact("x" * 250)
    scene.add(fact)
    scene.settle()
    assert "Split it into several facts" in scene.recorder.failures[scene.handle(fact)]
    assert scene.recorder.counters["failed"] == 1
    scene.close()


def test_a_closed_engine_ends_it_quietly(scene: Recording, caplog: pytest.LogCaptureFixture) -> None:
    scene.engine.encodes.shut()
    facts = [new_fact() for _ in range(3)]
    scene.add(*facts)
    scene.engine.encodes.arrival()
    scene.fake.close()
    scene.engine.encodes.open()
    assert not scene.recorder.wait(PATIENCE)
    assert scene.recorder.pending == 0 and scene.recorder.failures == {}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    scene.remove(facts[0])
    scene.add(facts[1])
    assert scene.recorder.pending == 0
    with pytest.raises(EngineClosedError):
        scene.recorder.ensure_headers([scene.planner.default_header()])


def test_an_engine_closed_in_the_middle_of_an_encode_ends_it_quietly(scene: Recording) -> None:
    scene.fake.pause_encoding()
    scene.add(new_fact(), new_fact())
    until(lambda: bool(scene.fake.encodes))
    scene.fake.close()
    assert not scene.recorder.wait(PATIENCE)
    assert scene.recorder.pending == 0


# Closing.


def test_close_while_busy_finishes_what_is_in_flight_and_leaves_the_rest(scene: Recording) -> None:
    first = new_fact()
    scene.add(first)
    scene.settle()
    scene.engine.encodes.shut()
    second, third = new_fact(), new_fact()
    scene.add(second, third)
    scene.engine.encodes.arrival()
    closing = threading.Thread(target=scene.recorder.close)
    closing.start()
    until(lambda: scene.recorder.pending == 1)
    scene.engine.encodes.open()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert scene.ready(first, second, third) == [True, True, False]
    assert not scene.recorder.wait(0.0), "one fact was left"
    scene.recorder.close()


def test_what_fails_after_close_is_left_over_and_not_retried(scene: Recording) -> None:
    fact = new_fact()
    scene.engine.fail = failing(scene.handle(fact), EngineError("hiccup"), times=1)
    scene.engine.encodes.shut()
    scene.add(fact)
    scene.engine.encodes.arrival()
    closing = threading.Thread(target=scene.recorder.close)
    closing.start()
    until(lambda: scene.recorder._closed)
    scene.engine.encodes.open()
    closing.join(PATIENCE)
    assert scene.recorder.pending == 0 and not scene.recorder.wait(0.0)
    assert scene.ready(fact) == [False]


def test_close_without_any_work_starts_no_thread(scene: Recording) -> None:
    before = threading.active_count()
    recorder = scene.new_recorder()
    recorder.close()
    assert threading.active_count() == before
    recorder.add([new_fact()])
    recorder.rebuild()
    assert recorder.pending == 0 and recorder.wait(0.0)


def test_removal_still_reaches_the_engine_after_close(scene: Recording) -> None:
    fact = new_fact()
    scene.add(fact)
    scene.settle()
    scene.recorder.close()
    scene.remove(fact)
    assert scene.held(fact) == [False]


# Rebuilding.


def test_rebuild_encodes_all_owners_newest_first_and_each_in_the_order_of_its_chain(scene: Recording) -> None:
    a1, b1, b2, a2 = new_fact(), new_fact(scope=BOB), new_fact(scope=BOB), new_fact()
    scene.index.put(a1, b1, b2, a2)
    scene.recorder.rebuild()
    scene.settle()
    assert scene.engine.encoded == scene.handles(a1, a2, b1, b2)
    assert scene.recorder.counters["tokens_injected"] > 0


def test_rebuild_stops_at_the_budget() -> None:
    scene = Recording("alone", record_bytes=64 * 120)
    facts = [new_fact("x" * 37) for _ in range(5)]
    scene.index.put(*facts)
    scene.recorder.rebuild()
    scene.settle()
    assert scene.ready(*facts) == [False, False, True, True, True] == scene.held(*facts)
    scene.close()


def test_new_facts_are_encoded_before_the_backlog(scene: Recording) -> None:
    old = [new_fact() for _ in range(3)]
    scene.index.put(*old)
    scene.engine.encodes.shut()
    scene.recorder.rebuild()
    scene.engine.encodes.arrival()
    new = new_fact()
    scene.add(new)
    scene.engine.encodes.open()
    scene.settle()
    assert scene.engine.encoded == scene.handles(old[0], new, *old[1:])


def test_rebuild_survives_an_index_that_cannot_be_listed(scene: Recording) -> None:
    def broken(scope: object = None) -> list[Fact]:
        raise StoreError("cannot be read")

    scene.index.facts = broken  # type: ignore[method-assign]
    scene.recorder.rebuild()
    scene.settle()
    del scene.index.facts  # type: ignore[method-assign]
    fact = new_fact()
    scene.add(fact)
    scene.settle()
    assert scene.ready(fact) == [True]


# All at once.


def test_sixteen_threads_that_add_remove_and_ask(scene: Recording) -> None:
    def work(number: int) -> tuple[list[Fact], list[Fact]]:
        scope = replace(ALICE, run_id=str(number % 4))
        kept: list[Fact] = []
        removed: list[Fact] = []
        for step in range(6):
            fact = Fact(f"{number}-{step}", f"Fact {step} of {number}.", scope, "1", f"2025-03-01T00:00:{step:02}")
            scene.add(fact)
            kept.append(fact)
            scene.recorder.observe(scene.ask(*kept), scene.plan(*kept))
            if step % 3 == 2:
                gone = kept.pop(0)
                scene.remove(gone)
                removed.append(gone)
                assert scene.ready(gone) == [False]
            if step == 4:
                scene.fake.evict_all()
        return kept, removed

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    scene.settle()
    kept = [fact for facts, _ in results for fact in facts]
    removed = [fact for _, facts in results for fact in facts]
    # What was evicted last comes back when it is asked for.
    for fact in kept:
        scene.recorder.observe(scene.ask(fact), scene.plan(fact))
    scene.settle()
    assert all(scene.ready(*kept)) and all(scene.held(*kept))
    assert not any(scene.ready(*removed)) and not any(scene.held(*removed))
    assert scene.recorder.failures == {}
    gone = set(scene.handles(*removed))
    latest = {plan.spans[0].handle: plan for plan in scene.engine.plans}
    for fact in kept:
        seen = {segment.handle for segment in latest[scene.handle(fact)].segments}
        assert not seen & gone, "no record that is left has seen a removed fact"


# An engine that cannot be reached.


class Away:
    """The scene's engine out of reach, until ``back``."""

    def __init__(self, scene: Recording) -> None:
        self._inner, self._real, self.asked = scene.engine.inner, {}, 0
        for name in ("drop", "encode"):
            self._real[name] = getattr(self._inner, name)
            setattr(self._inner, name, self._fail)

    def _fail(self, *args: object) -> None:
        self.asked += 1
        raise EngineAwayError("No server")

    def back(self) -> None:
        for name, method in self._real.items():
            setattr(self._inner, name, method)


def test_a_record_that_could_not_be_dropped_is_dropped_when_the_engine_is_back(scene: Recording) -> None:
    gone, above = new_fact(), new_fact()
    scene.add(gone, above)
    scene.settle()
    away = Away(scene)
    with pytest.raises(EngineAwayError):
        scene.remove(gone)
    assert scene.ready(gone, above) == [False, False] and scene.held(gone) == [True]
    until(lambda: away.asked > 5)
    assert scene.recorder.pending and not scene.recorder.wait(0)
    away.back()
    scene.settle()
    assert scene.held(gone, above) == [False, True] and scene.ready(gone, above) == [False, True]


def test_facts_wait_for_an_engine_that_is_away_however_long(scene: Recording) -> None:
    away = Away(scene)
    facts = [new_fact() for _ in range(3)]
    scene.add(*facts)
    until(lambda: away.asked > 10)  # more often than a fact that fails is tried
    assert [scene.recorder.failure(handle) for handle in scene.handles(*facts)] == [None] * 3
    assert scene.recorder.pending == 3
    away.back()
    scene.settle()
    assert scene.ready(*facts) == [True] * 3
    assert scene.engine.encoded[-3:] == scene.handles(*facts)


def test_an_engine_that_refuses_to_drop_keeps_nobody_from_being_encoded(scene: Recording) -> None:
    gone, other = new_fact(), new_fact()
    scene.add(gone)
    scene.settle()

    def broken(handles: object, alive: object = ()) -> None:
        raise EngineError("no")

    drop, scene.engine.inner.drop = scene.engine.inner.drop, broken  # type: ignore[method-assign]
    recorder = scene.new_recorder(backoff_s=3600.0)
    scene.index.take(gone)
    with pytest.raises(EngineError):
        recorder.remove([gone])
    scene.index.put(other)
    recorder.add([other])
    until(lambda: recorder.is_ready(scene.record(other)))
    assert recorder.pending == 1
    scene.engine.inner.drop = drop  # type: ignore[method-assign]
    recorder.close()


def test_the_next_process_drops_what_this_one_could_not(scene: Recording, tmp_path: Path) -> None:
    path = tmp_path / "owed.db"
    gone = new_fact()
    scene.add(gone)
    scene.settle()
    away = Away(scene)
    recorder = scene.new_recorder(owed=OwedDrops(path))
    scene.index.take(gone)
    with pytest.raises(EngineAwayError):
        recorder.remove([gone])
    recorder.close()
    assert path.stat().st_mode & 0o077 == 0 and list(OwedDrops(path)) == scene.handles(gone)
    away.back()
    assert scene.held(gone) == [True]
    after = scene.new_recorder(owed=OwedDrops(path))
    after.rebuild()
    assert after.wait(PATIENCE)
    assert scene.held(gone) == [False] and list(OwedDrops(path)) == []
    after.close()


def test_a_drop_that_was_interrupted_is_made_good(
    scene: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the engine has done it: by this process, or by the next one if this one dies meanwhile."""
    path = tmp_path / "owed.db"
    gone = new_fact()
    recorder = scene.new_recorder(owed=OwedDrops(path))
    recorder.add([gone])
    assert recorder.wait(PATIENCE)
    scene.index.take(gone)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        assert list(OwedDrops(path)) == scene.handles(gone)  # what a process that dies here leaves
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(scene.engine, "drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorder.remove([gone])
    assert recorder.wait(PATIENCE)
    assert scene.held(gone) == [False] and list(OwedDrops(path)) == []
    recorder.close()
