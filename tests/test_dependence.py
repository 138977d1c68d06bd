from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscale_mem.recording.dependence import Dependence


def graph(**edges: str) -> Dependence:
    made = Dependence()
    for handle, context in edges.items():
        made.put(handle, context)
    return made


def test_standing_on_is_transitive_and_excludes_the_start() -> None:
    chain = graph(b="a", c="b", d="c", x="y")
    assert chain.standing_on(["a"]) == {"b", "c", "d"}
    assert chain.standing_on(["b"]) == {"c", "d"}
    assert chain.standing_on(["d"]) == set()
    assert chain.standing_on(["a", "c"]) == {"b", "d"}


def test_reencoding_replaces_the_context_of_a_record_nobody_stands_on() -> None:
    chain = graph(b="a")
    chain.put("b", "c")
    assert chain.standing_on(["a"]) == set()
    assert chain.standing_on(["c"]) == {"b"}


def test_reencoding_keeps_what_the_earlier_record_had_seen_while_others_stand_on_it() -> None:
    chain = graph(b="a", d="b")
    chain.put("b", "c")
    assert chain.standing_on(["a"]) == {"b", "d"}
    assert chain.standing_on(["c"]) == {"b", "d"}


def test_forgotten_handles_leave_nothing_behind() -> None:
    chain = graph(b="a", c="ab")
    chain.forget(["a", "b", "c"])
    assert len(chain) == 0
    assert chain.standing_on(["a", "b"]) == set()
    chain.put("c", "b")
    assert chain.standing_on(["a"]) == set()


@given(st.lists(st.tuples(st.integers(1, 12), st.sets(st.integers(0, 11), max_size=4)), max_size=30))
def test_every_fact_ever_seen_by_a_living_record_is_found(steps: list[tuple[int, set[int]]]) -> None:
    made = Dependence()
    contents: dict[str, set[str]] = {}
    for number, below in steps:
        handle, context = str(number), {str(b) for b in below if b < number}
        made.put(handle, context)
        contents[handle] = context.union(*(contents.get(c, set()) for c in context))
    for handle, seen in contents.items():
        for fact in seen:
            assert handle in made.standing_on([fact])
