"""The vector store against Mem0's own, on the same data: the same rows, order and scores, whatever is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mem0.utils.factory import VectorStoreFactory
from mem0.vector_stores.qdrant import Qdrant
from qdrant_client import QdrantClient

from inferscale_mem import InferScaleMemory
from inferscale_mem.adapters.mem0.keywords import KeywordTable
from inferscale_mem.adapters.mem0.listing import rows
from inferscale_mem.adapters.mem0.resident_qdrant import ResidentQdrant, ResidentQdrantConfig, resident
from inferscale_mem.adapters.mem0.vectors import VectorTable
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.testing import FakeEngine

DIMS = 12
WORDS = ("tea", "Lyon", "dog", "violin", "olive", "May", "red")


def uuid(number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012d}"


class Words:
    """In fastembed's place, which needs a download: the encoder's interface, one index per word."""

    def embed(self, texts: list[str]) -> Iterator[Any]:
        for text in texts:
            found = {word: text.split().count(word) for word in WORDS if word in text.split()}
            indices = np.array([11 * WORDS.index(word) + 3 for word in found], np.int64)
            values = np.array([count / (count + 1.2) for count in found.values()])
            yield SimpleNamespace(indices=indices, values=values)


class Pair:
    """Mem0's store and ours, given the same data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.mem0 = Qdrant("facts", DIMS, path=str(self.path / "mem0"))
        self.ours = ResidentQdrant("facts", path=str(self.path / "ours"), embedding_model_dims=DIMS)
        for store in (self.mem0, self.ours):
            store._bm25_encoder = Words()

    def close(self) -> None:
        for store in (self.mem0, self.ours):
            store.client.close()

    def do(self, method: str, *args: Any, **kwargs: Any) -> None:
        for store in (self.mem0, self.ours):
            getattr(store, method)(*args, **kwargs)

    def same_search(self, vector: list[float], top_k: int, filters: Any) -> None:
        theirs, ours = (outcome(store.search, "", vector, top_k, filters) for store in (self.mem0, self.ours))
        if isinstance(theirs, type):
            assert ours is theirs, filters
            return
        assert [(hit.id, hit.payload) for hit in ours] == [(hit.id, hit.payload) for hit in theirs], filters
        np.testing.assert_allclose([hit.score for hit in ours], [hit.score for hit in theirs], atol=1e-6)
        assert [type(hit) for hit in ours] == [type(hit) for hit in theirs]

    def same_list(self, top_k: int, filters: Any) -> None:
        assert outcome(self.ours.list, filters, top_k) == outcome(self.mem0.list, filters, top_k), filters

    def same_keywords(self, query: str, top_k: int, filters: Any) -> None:
        every = {hit.id: hit for hit in self.mem0.keyword_search(query, 10_000, filters)}
        ours = self.ours.keyword_search(query, top_k, filters)
        # Many rows have equal scores; which of them come first is chance in Qdrant.
        best = sorted((hit.score for hit in every.values()), reverse=True)
        assert [hit.score for hit in ours] == best[:top_k], filters
        assert all(every[hit.id].score == hit.score and every[hit.id].payload == hit.payload for hit in ours)


def same_rows(some: Iterable[Any], others: Iterable[Any]) -> None:
    """Qdrant makes its vectors' length 1 again with each search, so the last bit may move."""
    one, two = (sorted(every, key=lambda row: str(row[0])) for every in (some, others))
    assert [row[:2] for row in one] == [row[:2] for row in two]
    np.testing.assert_allclose([row[2] for row in one], [row[2] for row in two], rtol=1e-5)


def outcome(call: Any, *args: Any) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return call(*args)
    except Exception as error:  # whatever it is, both must raise it
        return type(error)


def vectors(rng: np.random.Generator, count: int) -> list[list[float]]:
    return [row.tolist() for row in rng.normal(size=(count, DIMS))]


def payloads(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Of the kinds that Mem0 writes, and of kinds that apps make of them."""
    choices: dict[str, list[Any]] = {
        "user_id": ["a", "a", "b", "c", None, ["a", "b"], 7],
        "agent_id": ["x", "y", ...],
        "run_id": ["1", "2", 1, ...],
        "n": [0, 1, 2.0, 2, -3, True, "2", None, ...],
        "tags": ["tea", ["tea", "red"], [], [None], "Red tea", ...],
        "when": ["2026-01-01", "2026-03-01T10:00:00Z", "soon", ...],
        "place": [{"city": "Lyon", "floor": 2}, {"city": ["Lyon", "Paris"]}, [{"city": "Rome"}], "Lyon", ...],
    }
    made = []
    for _ in range(count):
        drawn = {name: values[rng.integers(len(values))] for name, values in choices.items()}
        text = " ".join(rng.choice(WORDS, size=rng.integers(1, 6)))
        made.append({"data": text, **{name: value for name, value in drawn.items() if value is not ...}})
    return made


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair, rng = Pair(tmp_path_factory.mktemp("pair")), np.random.default_rng(0)
    pair.do("insert", vectors(rng, 150), payloads(rng, 150), [uuid(n) for n in rng.permutation(150)])
    yield pair
    pair.close()


KEYS = st.sampled_from(
    ["user_id", "agent_id", "run_id", "n", "tags", "tags[]", "when", "place.city", "place[].city", "none"]
)
SCALARS = st.sampled_from(["a", "b", "x", "1", 1, 2, True, "tea", "Red", "*", "Lyon", "", 2.0, None])
STAMPS = st.sampled_from([0, 1.5, 2, "2026-02-01", "2026-03-01T10:00:00+00:00", "x"])
OPERATORS = st.one_of(
    st.dictionaries(st.sampled_from(["eq", "ne"]), SCALARS, min_size=1, max_size=1),
    st.dictionaries(st.sampled_from(["in", "nin"]), st.lists(SCALARS, max_size=3), min_size=1, max_size=1),
    st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), STAMPS, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["contains", "icontains", "odd"]), SCALARS, min_size=1, max_size=1),
)
CONDITIONS = st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=3), OPERATORS), max_size=3)
FILTERS = st.recursive(
    CONDITIONS,
    lambda inner: st.builds(
        lambda plain, logic: {**plain, **logic},
        CONDITIONS,
        st.dictionaries(st.sampled_from(["AND", "OR", "NOT", "$or", "$not"]), st.lists(inner, max_size=2), max_size=2),
    ),
    max_leaves=6,
)
often = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@often
@given(filters=st.one_of(st.none(), FILTERS), top_k=st.sampled_from([1, 5, 60, 500]), seed=st.integers(0, 20))
def test_any_filter_means_what_it_means_to_qdrant(filled: Pair, filters: Any, top_k: int, seed: int) -> None:
    filled.same_search(vectors(np.random.default_rng(seed), 1)[0], top_k, filters)
    filled.same_list(top_k, filters)


@often
@given(filters=CONDITIONS, query=st.lists(st.sampled_from(WORDS), max_size=4), top_k=st.sampled_from([1, 7, 500]))
def test_any_keywords(filled: Pair, filters: Any, query: list[str], top_k: int) -> None:
    if not isinstance(outcome(filled.mem0.search, "", [0.0] * DIMS, 1, filters), type):
        filled.same_keywords(" ".join(query), top_k, filters)


def test_batch(filled: Pair) -> None:
    many = vectors(np.random.default_rng(5), 4)
    theirs, ours = (store.search_batch([""] * 4, many, 3, {"user_id": "a"}) for store in (filled.mem0, filled.ours))
    assert [[hit.id for hit in hits] for hits in ours] == [[hit.id for hit in hits] for hits in theirs]


@pytest.mark.parametrize("seed", range(4))
def test_it_follows_every_write_and_reopening(tmp_path: Path, seed: int) -> None:
    pair, rng = Pair(tmp_path), np.random.default_rng(seed)
    for step in range(60):
        row = uuid(int(rng.integers(25)))
        (vector,), (payload,) = vectors(rng, 1), payloads(rng, 1)
        match int(rng.integers(12)):
            case 0 | 1 | 2 | 3:
                pair.do("insert", [vector], [payload], [row])
            case 4 | 5:
                pair.do("insert", vectors(rng, 3), payloads(rng, 3), [uuid(25 + n) for n in rng.permutation(9)[:3]])
            case 6:
                pair.do("update", row, vector, payload)
            case 7:
                outcomes = {outcome(s.update, row, None, {"n": 5, "user_id": "b"}) for s in (pair.mem0, pair.ours)}
                assert len(outcomes) == 1
            case 8 | 9:
                pair.do("delete", row)
            case 10 if step % 5 == 0:
                pair.do("reset")
            case _:
                pair.close()
                pair.open()
        for filters in (None, {"user_id": "a"}, {"user_id": "b", "n": {"gte": 1}}):
            pair.same_search(vectors(rng, 1)[0], 20, filters)
            pair.same_list(20, filters)
            pair.same_keywords("tea Lyon", 20, filters)
    same_rows(rows(pair.ours), rows(pair.mem0))
    pair.close()


def test_the_same_folder_for_both_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ours = ResidentQdrant("facts", path=str(tmp_path))
    ours.insert(vectors(rng, 5), payloads(rng, 5), [uuid(n) for n in range(5)])
    ours.client.close()
    mem0 = Qdrant("facts", DIMS, path=str(tmp_path))
    assert [row.id for row in mem0.list()[0]] == [uuid(n) for n in range(5)]
    again = resident(mem0)
    assert isinstance(again, ResidentQdrant) and again.resident and resident(again) is again
    assert len(again.search("", [1.0] * DIMS, 9)) == 5
    again.client.close()


def test_what_it_returns_is_the_callers(filled: Pair) -> None:
    (hit,) = filled.ours.search("", [1.0] * DIMS, 1, {"tags": {"eq": "red"}})
    hit.payload["tags"].append("changed")
    filled.ours.list(None, 1)[0][0].payload.clear()
    filled.same_search([1.0] * DIMS, 500, None)


def test_threads(tmp_path: Path) -> None:
    """Embedded Qdrant alone loses adds, with IndexError."""
    store = ResidentQdrant("facts", DIMS, path=str(tmp_path))
    failed: list[BaseException] = []

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        try:
            for step in range(20):
                row = uuid(100 * worker + step)
                store.insert(vectors(rng, 1), [{"user_id": str(worker), "n": step}], [row])
                assert row in {hit.id for hit in store.search("", vectors(rng, 1)[0], 50, {"user_id": str(worker)})}
                if step % 3 == 0:
                    store.delete(row)
                elif step % 3 == 1:
                    store.update(row, None, {"changed": True})
                store.list({"user_id": str(worker)}, 5)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    known = list(rows(store))
    assert len(known) == 8 * 13 == store.client.count("facts").count
    assert sum(payload.get("changed", False) for _, payload, _ in known) == 8 * 7
    store.client.close()
    fresh = ResidentQdrant("facts", path=str(tmp_path))
    same_rows(rows(fresh), known)
    fresh.client.close()


# Dimensions.


def test_an_absent_collection_takes_the_first_vectors_length(tmp_path: Path) -> None:
    store = ResidentQdrant("facts", path=str(tmp_path))
    assert not store.exists and store.embedding_model_dims is None
    assert store.search("", [1.0, 2.0], 5) == [] and store.list() == ([], None) and store.get(uuid(1)) is None
    store.reset()
    with pytest.raises(ConfigError, match="3 numbers"):
        store.insert([[1.0, 0.0], [1.0, 0.0, 0.0]], [{}, {}], [uuid(1), uuid(2)])
    assert not store.exists
    store.insert([[1.0, 0.0]], [{"user_id": "a"}], [uuid(1)])
    assert store.embedding_model_dims == 2
    assert store.client.get_collection("facts").config.params.vectors.size == 2
    assert [hit.id for hit in store.search("", [1.0, 2.0], 5, {"user_id": "a"})] == [uuid(1)]
    store.client.close()


def test_vectors_that_do_not_fit(tmp_path: Path) -> None:
    store = ResidentQdrant("facts", 2, path=str(tmp_path))
    with pytest.raises(ConfigError, match="gives 3 numbers per text, the collection was made for 2"):
        store.insert([[1.0, 0.0], [1.0, 0.0, 0.0]], [{}, {}], [uuid(1), uuid(2)])
    assert store.list() == ([], None)
    store.insert([[1.0, 0.0]], [{}], [uuid(1)])
    with pytest.raises(ConfigError, match="3 numbers"):
        store.update(uuid(1), [1.0, 0.0, 0.0], {})
    with pytest.raises(ConfigError, match="3 numbers"):
        store.search("", [1.0, 0.0, 0.0])
    with pytest.raises(InputError, match="NaN"):
        store.search("", [1.0, float("nan")])
    store.client.close()
    with pytest.raises(ConfigError, match="holds embeddings of 2 numbers, not 3"):
        ResidentQdrant("facts", 3, path=str(tmp_path))
    ResidentQdrant("facts", 2, path=str(tmp_path)).client.close()  # not locked by the one that failed


# Where others may write.


def test_a_shared_store_is_asked_itself(engine: FakeEngine) -> None:
    """A server is used by many; a client that the app made stands for one here."""
    client = QdrantClient(":memory:")
    ours = ResidentQdrant("facts", 2, client=client)
    other = Qdrant("facts", 2, client=client)
    assert not ours.resident
    assert ours.search("", [1.0, 0.0]) == []
    other.insert([[1.0, 0.0]], [{"user_id": "a"}], [uuid(1)])
    assert [hit.id for hit in ours.search("", [1.0, 0.0], 5, {"user_id": "a"})] == [uuid(1)]
    assert [row.id for row in ours.list()[0]] == [uuid(1)]
    assert resident(other) is other and not isinstance(other, ResidentQdrant)
    with pytest.raises(ConfigError, match="embedding_model_dims"):
        ResidentQdrant("absent", client=client)


# In a memory.


def test_by_name(engine: FakeEngine, tmp_path: Path) -> None:
    given = {
        "vector_store": {"provider": "inferscale", "config": {"path": str(tmp_path / "q"), "collection_name": "c"}}
    }
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert memory.config.vector_store.provider == "inferscale"
        assert memory.vector_store.resident and memory.vector_store.embedding_model_dims == 384
        assert memory.service.signer.store == "qdrant/c", "as if Mem0's class had opened it"
        memory.add("I live in Lyon.", infer=False, user_id="a")
        handle = memory.search("Lyon", filters={"user_id": "a"})["results"][0]["memory"]
    given["vector_store"]["provider"] = "qdrant"
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert memory.vector_store.resident
        assert memory.resolve(handle) == "I live in Lyon."


def test_its_settings(home: Path, engine: FakeEngine) -> None:
    with InferScaleMemory.from_config({"vector_store": {"provider": "inferscale"}}, engine=engine) as memory:
        assert memory.config.vector_store.config.path == str(home / "inferscale" / "qdrant")
    assert ResidentQdrantConfig(url="http://localhost:6333").embedding_model_dims is None
    with pytest.raises(ValueError, match="'path', 'url', or 'host' and 'port'"):
        ResidentQdrantConfig(host="localhost")
    with pytest.raises(ValueError, match="Extra fields"):
        ResidentQdrantConfig(path="x", colection_name="y")


def test_with_telemetry_on(engine: FakeEngine, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mem0 then opens a second store by the same settings."""
    monkeypatch.setattr("mem0.memory.main.MEM0_TELEMETRY", True)
    monkeypatch.setattr("mem0.memory.main.capture_event", lambda *args, **kwargs: None)
    with InferScaleMemory.from_config({"vector_store": {"provider": "inferscale"}}, engine=engine) as memory:
        memory.add("I live in Lyon.", infer=False, user_id="a")
        assert len(memory.get_all(filters={"user_id": "a"})["results"]) == 1
        assert memory._telemetry_vector_store.client is not memory.vector_store.client


def test_mem0s_factory_makes_it(tmp_path: Path) -> None:
    store = VectorStoreFactory.create("inferscale", ResidentQdrantConfig(path=str(tmp_path)))
    assert isinstance(store, ResidentQdrant) and store.resident
    store.client.close()


def test_entities_are_searched_in_memory_too(memory: InferScaleMemory) -> None:
    entities = memory.entity_store
    assert isinstance(entities, ResidentQdrant) and entities.resident and entities is memory.entity_store
    assert entities.collection_name == "mem0_entities" and entities.embedding_model_dims == 384
    memory.add("I live in Lyon.", infer=False, user_id="a")
    (fact,) = memory.get_all(filters={"user_id": "a"})["results"]
    memory._upsert_entity("Lyon", "PROPER", fact["id"], {"user_id": "a"})
    (row,) = entities.list({"user_id": "a"})[0]
    assert row.payload["linked_memory_ids"] == [fact["id"]]
    (boosted,) = memory._compute_entity_boosts([("PROPER", "Lyon")], {"user_id": "a"})
    assert boosted == fact["id"]
    assert memory._compute_entity_boosts([("PROPER", "Lyon")], {"user_id": "b"}) == {}
    memory.reset()
    assert memory.entity_store.list() == ([], None)


# Tables.


def test_a_table_on_a_device_of_torch() -> None:
    host, device = VectorTable[int](), VectorTable[int]("cpu")
    rng = np.random.default_rng(3)
    for key, row in enumerate(vectors(rng, 50)):
        for table in (host, device):
            table.set(key, row)
    for table in (host, device):
        table.remove(7)
        table.remove(49)
    query = vectors(rng, 1)[0]
    for among in (None, [1, 2, 3, 7, 99], range(40)):
        theirs, ours = (list(table.ranked(query, among)) for table in (host, device))
        assert [key for key, _ in ours] == [key for key, _ in theirs]
        np.testing.assert_allclose([s for _, s in ours], [s for _, s in theirs], atol=1e-6)
    np.testing.assert_array_equal(host.get(3), device.get(3))
    assert list(VectorTable[int]().ranked(query)) == []


def test_a_keyword_table_forgets() -> None:
    table = KeywordTable[str]()
    table.set("one", {1: 1.0, 2: 1.0})
    table.set("one", {2: 1.0})
    table.set("two", {2: 0.5})
    assert table.ranked({1: 1.0}) == []
    assert [key for key, _ in table.ranked({2: 1.0, 1: 1.0})] == ["one", "two"]
    table.remove("one")
    table.remove("one")
    assert [key for key, _ in table.ranked({2: 1.0}, among={"two"})] == ["two"]
    assert table.ranked({2: 1.0}, among={"one"}) == []
