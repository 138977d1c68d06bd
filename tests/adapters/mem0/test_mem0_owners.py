"""Nobody sees another owner's memories, whatever filters a request comes with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from qdrant_client import QdrantClient

from inferscale_mem import InferScaleMemory
from inferscale_mem.adapters.mem0 import inputs
from inferscale_mem.errors import ScopeError
from inferscale_mem.testing import FakeEngine

OWNERS: list[dict[str, Any]] = [
    {"user_id": "alice"},
    {"user_id": "alice", "run_id": "r1"},
    {"user_id": "alice", "agent_id": "bot"},
    {"user_id": "bob"},
    {"user_id": "bob", "run_id": "r1"},
    {"agent_id": "bot"},
    {"user_id": "['alice']"},
]


@pytest.fixture(scope="module", params=["embedded", "client"])
def crowd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferScaleMemory]:
    """A memory of many owners, searched in memory or by Qdrant; all texts are equally similar to any query."""
    place: dict[str, Any] = {"path": str(tmp_path_factory.mktemp("q"))}
    if request.param == "client":
        place = {"client": QdrantClient(":memory:")}
    home = tmp_path_factory.mktemp("home")
    given = {"vector_store": {"config": place}, "history_db_path": ":memory:", "inferscale": {"home": str(home)}}
    engine = FakeEngine()
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        memory.embedding_model.embed = lambda text, action=None: [1.0] * 384
        for number, owners in enumerate(OWNERS):
            memory.add(f"Fact {number}.", infer=False, metadata={"owner": number}, **owners)
        assert memory.vector_store.resident if request.param == "embedded" else True
        yield memory
    engine.close()


IDS = st.sampled_from(["alice", "bob", "bot", "r1", "*", " alice ", "['alice']", "", 7, None])
WILD = st.one_of(
    IDS,
    st.lists(IDS, max_size=2),
    st.dictionaries(st.sampled_from(["eq", "ne", "in", "nin", "contains", "gt", "*"]), IDS, max_size=2),
    st.fixed_dictionaries({"in": st.lists(IDS, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"nin": st.lists(IDS, min_size=1, max_size=3)}),
)
FIELDS = st.sampled_from(["user_id", "agent_id", "run_id", "owner", "data"])
PLAIN = st.dictionaries(FIELDS, WILD, max_size=3)
LOGIC = st.recursive(
    PLAIN,
    lambda inner: st.builds(
        lambda plain, logic: {**plain, **logic},
        PLAIN,
        st.dictionaries(
            st.sampled_from(["AND", "OR", "NOT", "$or", "$not", "$and"]), st.lists(inner, max_size=3), max_size=2
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile=st.builds(lambda logic, own: {**logic, **own}, LOGIC, st.sampled_from([{}, *OWNERS])))
@example(hostile={"user_id": "alice", "AND": [{"user_id": "bob"}]})
@example(hostile={"user_id": "alice", "AND": [{"user_id": "*"}]})
@example(hostile={"user_id": "alice", "OR": [{"user_id": "alice"}, {"user_id": "bob"}]})
@example(hostile={"user_id": "alice", "NOT": [{"user_id": "alice"}]})
@example(hostile={"user_id": {"in": ["bob"]}})
@example(hostile={"user_id": ["bob"]})
@example(hostile={"user_id": "alice", "run_id": {"ne": "r1"}})
def test_hostile_filters(crowd: InferScaleMemory, hostile: dict[str, Any]) -> None:
    for ask in (crowd.search, crowd.get_all):
        try:
            found = ask(**({"query": "Fact", "threshold": 0.0} if ask == crowd.search else {}), filters=hostile)
        except Exception:
            continue  # refused: nothing is shown
        scope = inputs.owner_scope(hostile, "")
        for hit in found["results"]:
            assert scope.covers(inputs.owner_scope(hit, "")), hostile
            shown = crowd.resolve(hit["memory"])
            assert shown == f"Fact {hit['metadata']['owner']}."
            assert crowd.resolve(hit["memory"], filters={"user_id": "mallory"}) == hit["memory"]


def test_the_crowd_is_there(crowd: InferScaleMemory) -> None:
    """Else the test above shows nothing."""
    seen = {len(crowd.search("Fact", filters=owners)["results"]) for owners in OWNERS}
    assert seen == {3, 1, 2}
    leaky = {"user_id": "alice", "AND": [{"user_id": "bob"}]}
    assert len(super(InferScaleMemory, crowd).search("Fact", filters=leaky)["results"]) == 2, "Mem0 leaks"
    assert crowd.search("Fact", filters=leaky)["results"] == []


@pytest.mark.parametrize("owner", ["*", " * ", "", "   "])
def test_delete_all_takes_no_wildcard(crowd: InferScaleMemory, owner: str) -> None:
    for field in ("user_id", "agent_id", "run_id"):
        with pytest.raises(ScopeError):
            crowd.delete_all(**{field: owner})
    assert crowd.vector_store.client.count("mem0").count == len(OWNERS)
