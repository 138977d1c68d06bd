from __future__ import annotations

from inferscale_mem.recording.jobs import Job, JobQueue, made_at, oldest_first, rebuild_order
from inferscale_mem.types import Fact, Scope


def fact(name: str, created_at: str = "", owner: str = "alice") -> Fact:
    return Fact(name, name, Scope(user_id=owner), "1", created_at)


def drain(queue: JobQueue, now: float = 0.0) -> list[str]:
    taken = []
    while job := queue.pop(now):
        taken.append(job.handle)
    return taken


def test_first_in_first_out_and_one_job_per_handle() -> None:
    queue = JobQueue()
    assert [queue.put(Job(handle)) for handle in ("a", "b", "a")] == [True, True, False]
    assert len(queue) == 2
    assert drain(queue) == ["a", "b"]


def test_the_backlog_waits_and_what_is_wanted_now_leaves_it() -> None:
    queue = JobQueue()
    for handle in ("x", "y", "z"):
        assert queue.put(Job(handle), backlog=True)
    queue.put(Job("a"))
    assert not queue.put(Job("z"))
    assert not queue.put(Job("a"), backlog=True)
    assert drain(queue) == ["a", "z", "x", "y"]


def test_resting_jobs_come_when_due_unless_wanted_before() -> None:
    queue = JobQueue()
    queue.rest(Job("a"), due=5.0)
    queue.rest(Job("b"), due=3.0)
    assert queue.rest_until() == 3.0
    assert drain(queue, now=2.9) == []
    assert drain(queue, now=3.0) == ["b"]
    queue.put(Job("a"))
    assert queue.rest_until() is None
    assert drain(queue, now=0.0) == ["a"]


def test_a_job_that_is_queued_does_not_rest_as_well() -> None:
    queue = JobQueue()
    queue.put(Job("a"))
    queue.rest(Job("a"), due=9.0)
    assert len(queue) == 1


def test_discard_and_clear() -> None:
    queue = JobQueue()
    queue.put(Job("a"))
    queue.put(Job("b"), backlog=True)
    queue.rest(Job("c"), due=1.0)
    for handle in ("a", "b", "c", "unknown"):
        queue.discard(handle)
    assert len(queue) == 0
    queue.put(Job("d"))
    queue.clear()
    assert "d" not in queue


def test_oldest_first_across_time_zones_and_ties_in_given_order() -> None:
    facts = [
        fact("noon-utc", "2025-01-01T12:00:00+00:00"),
        fact("noon-naive", "2025-01-01T12:00:00"),
        fact("eleven-utc-by-offset", "2025-01-01T03:00:00-08:00"),
        fact("z", "2025-01-01T11:30:00Z"),
        fact("unknown"),
        fact("nonsense", "yesterday"),
    ]
    assert [f.id for f in oldest_first(facts)] == [
        "unknown",
        "nonsense",
        "eleven-utc-by-offset",
        "z",
        "noon-utc",
        "noon-naive",
    ]
    assert made_at(facts[0]) == made_at(facts[1])


def test_rebuild_takes_the_owner_who_spoke_last_first_and_each_owner_oldest_first() -> None:
    facts = [
        fact("a1", "2025-01-01", "alice"),
        fact("b1", "2025-01-02", "bob"),
        fact("b2", "2025-01-03", "bob"),
        fact("a2", "2025-01-04", "alice"),
    ]
    assert [f.id for f in rebuild_order(facts, lambda _: 1, None)] == ["a1", "a2", "b1", "b2"]


def test_rebuild_takes_the_owner_who_was_here_last_first() -> None:
    facts = [fact("a1", "2025-01-01", "alice"), fact("b1", "2025-01-02", "bob"), fact("c1", "2025-01-03", "carol")]
    used = {Scope(user_id="alice"): made_at(facts[2]) + 1, Scope(user_id="bob"): 1.0}
    order = rebuild_order(facts, lambda _: 1, None, lambda scope: used.get(scope, 0.0))
    assert [f.id for f in order] == ["a1", "c1", "b1"]


def test_rebuild_leaves_out_an_owners_oldest_facts_when_room_is_short() -> None:
    facts = [fact(f"a{n}", f"2025-02-0{n}", "alice") for n in range(1, 6)]
    facts += [fact("b1", "2025-01-01", "bob")]
    assert [f.id for f in rebuild_order(facts, lambda _: 10, 35)] == ["a3", "a4", "a5"]
    assert [f.id for f in rebuild_order(facts, lambda _: 10, 60)] == ["a1", "a2", "a3", "a4", "a5", "b1"]
    assert rebuild_order(facts, lambda _: 10, 9) == []
    assert rebuild_order([], lambda _: 10, 9) == []
