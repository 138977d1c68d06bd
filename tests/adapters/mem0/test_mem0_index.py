"""The index over a real vector store: what is found, in what order, and that it follows every write."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mem0.vector_stores.qdrant import Qdrant

from inferscale_mem.adapters.mem0.facts import age, fact_of, fact_of_hit
from inferscale_mem.adapters.mem0.index import VectorIndex
from inferscale_mem.adapters.mem0.journal import Journal
from inferscale_mem.adapters.mem0.qdrant import SerialClient, is_embedded, serialised
from inferscale_mem.adapters.mem0.store import FactStore
from inferscale_mem.adapters.mem0.turns import KEPT, TurnLog
from inferscale_mem.adapters.mem0.vectors import VectorTable
from inferscale_mem.errors import ConfigError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import FactIndex
from inferscale_mem.types import Fact, Scope

ALICE, BOB = Scope(user_id="alice"), Scope(user_id="bob")
SIGNER = HandleSigner(b"k" * 32, "test")
DIMS = 4


def uuid(number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012d}"


def payload(number: int, scope: Scope = ALICE, **kwargs: Any) -> dict[str, Any]:
    stamp = f"2026-01-01T00:00:{number:02d}+00:00"
    return {"data": f"fact {number}", "created_at": stamp, "updated_at": stamp, **scope.owners, **kwargs}


def angle(degrees: float) -> list[float]:
    return [float(np.cos(np.radians(degrees))), float(np.sin(np.radians(degrees))), 0.0, 0.0]


class Scene:
    """A store in a folder, its index, and what was reported."""

    def __init__(self, path: Path, *, exclusive: bool = True, embed: Any = None) -> None:
        self.raw = serialised(Qdrant("facts", DIMS, path=str(path)))
        self.index = VectorIndex(
            "test", lambda: self.raw, SIGNER.handle_id, embed or self._no_embedding, exclusive=exclusive
        )
        self.changes: list[tuple[list[str], list[str]]] = []
        self.store = FactStore(self.raw, self.index, self._changed, Journal(None))

    def _no_embedding(self, texts: list[str]) -> Any:
        raise AssertionError("the store gives its vectors back")

    def _changed(self, new: Any, gone: Any) -> None:
        self.changes.append(([fact.text for fact in new], [fact.text for fact in gone]))

    def insert(self, number: int, scope: Scope = ALICE, degrees: float = 0.0, **kwargs: Any) -> Fact:
        row = payload(number, scope, **kwargs)
        self.store.insert(vectors=[angle(degrees)], payloads=[row], ids=[uuid(number)])
        fact = fact_of(uuid(number), row)
        assert fact is not None
        return fact


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "qdrant")
    yield scene
    scene.raw.client.close()


def test_is_a_fact_index(scene: Scene) -> None:
    index: FactIndex = scene.index
    assert index.store == "test" and index.facts() == [] and index.get(uuid(1)) is None


def test_what_is_written_is_found(scene: Scene) -> None:
    one, two, other = scene.insert(1), scene.insert(2), scene.insert(3, BOB)
    assert scene.index.facts() == [one, two, other]
    assert scene.index.facts(ALICE) == [one, two]
    assert scene.index.get(one.id) == one
    assert scene.index.by_handle_id(SIGNER.handle_id(two)) == two
    assert scene.changes == [(["fact 1"], []), (["fact 2"], []), (["fact 3"], [])]


def test_what_was_there_before_is_found_too(tmp_path: Path) -> None:
    first = Scene(tmp_path)
    facts = [first.insert(number, degrees=10.0 * number) for number in range(1, 6)]
    first.raw.client.close()
    second = Scene(tmp_path)
    assert second.index.facts() == facts
    assert second.index.nearest(facts[4], 2) == [facts[3], facts[2]]
    second.raw.client.close()


def test_a_write_before_the_first_look_is_not_lost_or_doubled(tmp_path: Path) -> None:
    first = Scene(tmp_path)
    old = first.insert(1)
    first.raw.client.close()
    second = Scene(tmp_path)
    second.store.delete(old.id)
    assert second.changes == [([], ["fact 1"])]
    new = second.insert(2)
    assert second.index.facts() == [new]
    second.raw.client.close()


def test_rows_that_are_no_facts_are_ignored(scene: Scene) -> None:
    rows = [{"user_id": "alice", "type": "user_identity"}, {"data": "nobody's"}, {"data": " ", "user_id": "alice"}]
    scene.store.insert(vectors=[angle(0)] * 3, payloads=rows, ids=[uuid(n) for n in range(3)])
    assert scene.index.facts() == []
    assert scene.changes == [([], [])]


def test_update_reports_both_revisions(scene: Scene) -> None:
    old = scene.insert(1)
    row = payload(1, data="changed", updated_at="2026-02-02T00:00:00+00:00")
    scene.store.update(vector_id=old.id, vector=angle(90), payload=row)
    new = scene.index.get(old.id)
    assert new is not None and new.text == "changed" and new.revision != old.revision
    assert scene.index.by_handle_id(SIGNER.handle_id(old)) is None
    assert scene.index.by_handle_id(SIGNER.handle_id(new)) == new
    assert scene.changes[-1] == (["changed"], ["fact 1"])


def test_partial_updates_are_read_back(scene: Scene) -> None:
    """Qdrant merges a payload that comes without a vector, and keeps one that is not given."""
    scene.insert(1)
    fact = scene.insert(2)
    scene.store.update(vector_id=fact.id, payload={"colour": "red"})
    merged = scene.index.get(fact.id)
    assert merged is not None and merged.text == "fact 2" and merged.metadata == {"colour": "red"}
    assert len(scene.index.nearest(merged, 5)) == 1, "its vector is still known"
    scene.store.update(vector_id=fact.id, vector=angle(45))
    assert scene.index.get(fact.id) == merged


def test_delete_and_reset(scene: Scene) -> None:
    one, two = scene.insert(1), scene.insert(2)
    scene.store.delete(vector_id=one.id)
    scene.store.delete(vector_id=one.id)
    assert scene.index.facts() == [two] and scene.changes[2:] == [([], ["fact 1"])]
    scene.store.reset()
    assert scene.index.facts() == [] and scene.index.by_handle_id(SIGNER.handle_id(two)) is None
    assert scene.changes[3:] == [([], ["fact 2"])]


def test_nearest_and_previous_look_back_within_one_scope(scene: Scene) -> None:
    facts = [scene.insert(n, degrees=d) for n, d in [(1, 50.0), (2, 10.0), (3, 80.0), (4, 0.0), (5, 4.0)]]
    scene.insert(0, BOB, 0.0)
    scene.insert(6, Scope(user_id="alice", run_id="r"), 0.0)
    assert scene.index.nearest(facts[3], 9) == [facts[1], facts[0], facts[2]], "fact 5 is nearer, but newer"
    assert scene.index.nearest(facts[4], 2) == [facts[3], facts[1]]
    assert scene.index.previous(facts[3], 2) == [facts[2], facts[1]]
    assert scene.index.nearest(facts[0], 3) == [] and scene.index.previous(facts[0], 3) == []


def test_what_says_the_same_is_left_out_but_never_most_of_what_there_is(scene: Scene) -> None:
    degrees = [0.0, 60.0, 1.0, 30.0, 2.0, 3.0]
    facts = [scene.insert(n, degrees=d) for n, d in enumerate([*degrees, 0.0], start=1)]
    alike = math.cos(math.radians(10))
    assert scene.index.nearest(facts[6], 4) == [facts[0], facts[2], facts[4], facts[5]]
    assert scene.index.nearest(facts[6], 4, below=alike) == [facts[3], facts[1]]
    # No more than m of them, or half of the seven: an embedder may find everything alike.
    assert scene.index.nearest(facts[6], 2, below=-1.0) == [facts[5], facts[3]]


def test_equal_times_are_told_apart(scene: Scene) -> None:
    same = "2026-01-01T00:00:00+00:00"
    facts = [scene.insert(n, created_at=same) for n in (3, 1, 2)]
    assert [fact.id for fact in scene.index.facts()] == [uuid(1), uuid(2), uuid(3)]
    assert {len(scene.index.previous(fact, 9)) for fact in facts} == {0, 1, 2}
    assert {len(scene.index.nearest(fact, 9)) for fact in facts} == {0, 1, 2}


@pytest.mark.parametrize(
    "earlier, later",
    [
        ("2026-01-01T00:00:00+02:00", "2026-01-01T00:00:00+00:00"),
        ("2026-01-01T00:00:00", "2026-01-01T00:00:00.5+00:00"),
        ("last summer", "1999-01-01"),
        ("", "1999-01-01"),
    ],
)
def test_ages(earlier: str, later: str) -> None:
    assert age(Fact("2", "x", ALICE, "r", earlier)) < age(Fact("1", "x", ALICE, "r", later))


def test_expired_facts_are_not_live(scene: Scene) -> None:
    dead = scene.insert(1, expiration_date="2020-01-01")
    last = scene.insert(2, expiration_date="2999-01-01")
    new = scene.insert(3)
    assert scene.index.facts() == [last, new]
    assert scene.index.get(dead.id) is None and scene.index.by_handle_id(SIGNER.handle_id(dead)) is None
    assert scene.index.previous(new, 9) == [last] and scene.index.nearest(new, 9) == [last]
    assert scene.changes[0] == ([], [])
    assert scene.index.sweep() == [dead] and scene.index.sweep() == []


def test_a_note_makes_no_new_revision(tmp_path: Path) -> None:
    scene = Scene(tmp_path, exclusive=False)
    fact = scene.insert(1, colour="green")
    before = scene.store.get(vector_id=fact.id).payload
    reported = len(scene.changes)
    assert scene.store.note(fact.id, {"end": 5})
    noted = scene.index.get(fact.id)
    assert noted is not None and noted.revision == fact.revision and noted.metadata == {"colour": "green", "end": 5}
    assert scene.store.get(vector_id=fact.id).payload == {**before, "end": 5} and len(scene.changes) == reported
    assert scene.index.by_handle_id(SIGNER.handle_id(fact)) == noted
    assert not scene.store.note(uuid(2), {"end": 5}) and scene.store.get(vector_id=uuid(2)) is None
    scene.raw.update(vector_id=fact.id, payload={"end": 6})  # another process
    again = scene.index.get(fact.id)
    assert again is not None and again.metadata["end"] == 6


def test_a_shared_store_is_read_again(tmp_path: Path) -> None:
    """Somebody else may write to a server."""
    scene = Scene(tmp_path, exclusive=False)
    fact = scene.insert(1)
    handle_id = SIGNER.handle_id(fact)
    assert scene.index.by_handle_id(handle_id) == fact
    row = payload(1, data="changed elsewhere", updated_at="2026-02-02")
    scene.raw.update(vector_id=fact.id, vector=angle(0), payload=row)
    assert scene.index.by_handle_id(handle_id) is None
    changed = scene.index.get(fact.id)
    assert changed is not None and changed.text == "changed elsewhere"
    scene.raw.insert(vectors=[angle(0)], payloads=[payload(2)], ids=[uuid(2)])
    elsewhere = fact_of(uuid(2), payload(2))
    assert elsewhere is not None and scene.index.by_handle_id(SIGNER.handle_id(elsewhere)) is None
    scene.index.learn(elsewhere)
    assert scene.index.by_handle_id(SIGNER.handle_id(elsewhere)) == elsewhere
    scene.raw.delete(vector_id=fact.id)
    assert scene.index.get(fact.id) is None
    scene.raw.client.close()


class Listed:
    """A store that only lists its rows, and gives no vectors back."""

    def __init__(self, rows: list[Any], nested: bool) -> None:
        self.rows, self.nested = rows, nested

    def list(self, filters: Any = None, top_k: int | None = None) -> Any:
        return [self.rows] if self.nested else self.rows

    def get(self, vector_id: str) -> Any:
        return next((row for row in self.rows if row.id == vector_id), None)


@pytest.mark.parametrize("nested", [True, False])
def test_stores_that_cannot_be_scrolled(nested: bool) -> None:
    rows = [SimpleNamespace(id=uuid(n), payload=payload(n)) for n in range(1, 4)]
    asked: list[list[str]] = []

    def embed(texts: list[str]) -> list[list[float]]:
        asked.append(texts)
        return [angle(10.0 * int(text.split()[1])) for text in texts]

    index = VectorIndex("test", lambda: Listed(rows, nested), SIGNER.handle_id, embed, exclusive=False)
    facts = index.facts()
    assert [fact.text for fact in facts] == ["fact 1", "fact 2", "fact 3"]
    assert index.nearest(facts[2], 2) == [facts[1], facts[0]]
    assert index.nearest(facts[2], 1) == [facts[1]]
    assert asked == [["fact 1", "fact 2", "fact 3"]]


def test_dims_are_checked_before_anything_is_written(scene: Scene) -> None:
    for write in (
        lambda: scene.store.insert(vectors=[[1.0] * 3], payloads=[payload(1)], ids=[uuid(1)]),
        lambda: scene.store.update(vector_id=uuid(1), vector=[1.0] * 3, payload=payload(1)),
    ):
        with pytest.raises(ConfigError, match="3 numbers per text, the collection was made for 4"):
            write()
    assert scene.raw.list()[0] == [] and scene.changes == []


def test_hits_and_rows_are_the_same_fact() -> None:
    row = payload(1, role="user", topic="x")
    hit = {"id": uuid(1), "memory": row["data"], "score": 1.0, "metadata": {"topic": "x"}, **row}
    del hit["data"]
    from_row, from_hit = fact_of(uuid(1), row), fact_of_hit(hit)
    assert from_row is not None and from_hit is not None
    assert SIGNER.mint(from_row) == SIGNER.mint(from_hit)


def test_store_passes_everything_else_on(scene: Scene) -> None:
    scene.insert(1)
    assert scene.store.collection_name == "facts" and scene.store.client is scene.raw.client
    assert scene.store.search(query="x", vectors=angle(0), top_k=1)[0].id == uuid(1)
    assert scene.store.search_batch(["x"], [angle(0)])[0][0].id == uuid(1)
    assert scene.store.get(vector_id=uuid(1)).payload["data"] == "fact 1"
    assert len(scene.store.list()[0]) == 1
    assert [c.name for c in scene.store.list_cols().collections] == ["facts"]
    assert scene.store.col_info().points_count == 1
    with pytest.raises(AttributeError):
        scene.store.nonsense  # noqa: B018


def test_threads_lose_nothing(scene: Scene) -> None:
    """Embedded Qdrant alone loses adds."""
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for n in range(20):
                scene.insert(100 * worker + n % 60, created_at=f"2026-01-01T{worker:02d}:00:{n:02d}+00:00")
                scene.store.search(query="x", vectors=angle(n), top_k=3, filters={"user_id": "alice"})
                scene.index.facts(ALICE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(scene.raw.list(top_k=1000)[0]) == len(scene.index.facts()) == 160


def test_updates_of_one_row_reach_store_and_index_in_the_same_order(scene: Scene) -> None:
    scene.insert(1)

    def work(worker: int) -> None:
        for n in range(20):
            scene.store.update(vector_id=uuid(1), vector=angle(0), payload=payload(1, data=f"{worker} {n}"))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fact = scene.index.get(uuid(1))
    assert fact is not None and fact.text == scene.raw.get(uuid(1)).payload["data"]


@pytest.mark.parametrize("gone", ["delete", "delete_col"])
def test_what_is_deleted_the_moment_it_is_stored_is_not_in_the_index_afterwards(scene: Scene, gone: str) -> None:
    stored, others_have_tried = threading.Event(), threading.Event()
    insert = scene.raw.insert

    def slow_insert(**kwargs: Any) -> None:
        insert(**kwargs)
        stored.set()
        others_have_tried.wait(0.2)

    scene.raw.insert = slow_insert
    adding = threading.Thread(target=scene.insert, args=(1,))
    adding.start()
    stored.wait()
    scene.store.delete(uuid(1)) if gone == "delete" else scene.store.delete_col()
    others_have_tried.set()
    adding.join()
    assert scene.index.facts() == []
    assert scene.changes == [(["fact 1"], []), ([], ["fact 1"])]


def test_serial_client(scene: Scene) -> None:
    client = scene.raw.client
    assert isinstance(client, SerialClient) and is_embedded(client) and client.__deepcopy__({}) is client
    assert serialised(scene.raw).client is client, "wrapped once"
    assert not is_embedded(object())


# Vectors.


def test_vector_table() -> None:
    rng = np.random.default_rng(0)
    vectors = {str(n): rng.normal(size=8) for n in range(40)}
    table = VectorTable()
    for key, vector in vectors.items():
        table.set(key, vector.tolist())
    for key in ("0", "39", "17", "17"):
        table.remove(key)
        vectors.pop(key, None)
    vectors["5"] = rng.normal(size=8)
    table.set("5", vectors["5"].tolist())
    assert len(table) == 37 and "5" in table and "17" not in table
    query = rng.normal(size=8).astype(np.float32)
    cosine = {key: vector @ query / np.linalg.norm(vector) for key, vector in vectors.items()}
    ranked = list(table.ranked(query))
    assert [key for key, _ in ranked] == sorted(cosine, key=lambda key: -cosine[key])
    np.testing.assert_allclose(
        [score for _, score in ranked],
        sorted((c / np.linalg.norm(query) for c in cosine.values()), reverse=True),
        rtol=1e-5,
    )
    assert np.isclose(np.linalg.norm(table.get("5")), 1.0)
    with pytest.raises(KeyError):
        table.get("17")


def test_what_a_write_will_end_is_told_before_it(scene: Scene) -> None:
    """A process that dies in between must have left word for a server."""
    told: list[tuple[Any, int]] = []
    going = lambda rows: told.append((rows, len(scene.raw.list(top_k=9)[0])))  # noqa: E731
    store = FactStore(scene.raw, scene.index, scene._changed, Journal(None), going=going)
    one, two, _ = (scene.insert(number) for number in (1, 2, 3))
    store.delete(one.id)
    store.update(two.id, vector=angle(1.0), payload=payload(2, updated_at="2026-02-01T00:00:00+00:00"))
    store.reset()
    assert told == [([one.id], 3), ([two.id], 2), (None, 2)]


# Turns.


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def fact_at(stamp: str, scope: Scope = ALICE) -> Fact:
    return Fact("1", "x", scope, "r", stamp)


def test_turns_are_the_last_of_their_own_run(tmp_path: Path) -> None:
    """Case M8: never the oldest ones, never another run's."""
    log = TurnLog(tmp_path / "turns.db")
    run = Scope(user_id="alice", run_id="1")
    log.say(run, said(*(f"turn {n}" for n in range(25))))
    log.say(Scope(user_id="alice", run_id="2"), said("elsewhere"))
    log.say(ALICE, said("no run"))
    assert log.before(fact_at("2999-01-01", run), 3) == ["user: turn 22", "user: turn 23", "user: turn 24"]
    assert log.before(fact_at("2999-01-01"), 3) == ["user: no run"]
    assert log.before(fact_at("2000-01-01", run), 3) == []
    log.close()


def test_turns_are_few_spoken_and_purged(tmp_path: Path) -> None:
    log = TurnLog(tmp_path / "turns.db")
    log.say(ALICE, [{"role": "system", "content": "s"}, {"role": "user", "content": None}, *said("hello")])
    assert log.before(fact_at("2999-01-01"), 99) == ["user: hello"]
    log.say(ALICE, said(*map(str, range(2 * KEPT))))
    log.say(BOB, said("bob"))
    assert len(log.before(fact_at("2999-01-01"), 999)) == KEPT
    log.forget(ALICE)
    assert log.before(fact_at("2999-01-01"), 9) == [] and log.before(fact_at("2999-01-01", BOB), 9) == ["user: bob"]
    log.close()
    again = TurnLog(tmp_path / "turns.db")
    assert again.before(fact_at("2999-01-01", BOB), 9) == ["user: bob"]
    again.forget(None)
    assert again.before(fact_at("2999-01-01", BOB), 9) == []
    again.close()


def test_turns_of_others_are_never_looked_through(tmp_path: Path) -> None:
    """Each scope's turns are found by an index: an add takes as long with a million owners as with one."""
    log = TurnLog(tmp_path / "turns.db")
    statements: list[str] = []
    log._db.set_trace_callback(statements.append)
    log.say(ALICE, said("hello"))
    log.before(fact_at("2999-01-01"), 9)
    log.earlier(ALICE, [], 9)
    log._db.set_trace_callback(None)
    looked = [one for one in statements if one.startswith(("SELECT", "DELETE"))]
    plans = [row[3] for one in looked for row in log._db.execute(f"EXPLAIN QUERY PLAN {one}")]
    assert len(looked) == 3 and plans and not [plan for plan in plans if plan.startswith("SCAN")]
    log.close()
