from __future__ import annotations

import pytest

from inferscale_mem.engines.requests import find_context, find_records
from inferscale_mem.kv.directory import LAST, Directory
from inferscale_mem.types import EncodePlan, Miss, PromptPlan, Scope, Segment, Span

ALICE = Scope(user_id="alice")
HEADER = Segment("header", (1, 2, 3), "header")
FACT = Segment("fact", (4, 5), "fact", "handle")
SHORT = Segment("fact", (6,), "short", "short handle")
REST = Segment("text", (7,))


@pytest.fixture
def directory() -> Directory:
    directory = Directory(num_pages=16, page_size=4, page_bytes=8)
    for segment in (HEADER, FACT, SHORT):
        scope = ALICE if segment.handle else None
        record = directory.reserve(str(segment.record), segment.token_ids, segment.handle, scope, "store")
        directory.publish(record.generation)
    return directory


def names(plan: EncodePlan, directory: Directory) -> list[str]:
    return [record.name for record in find_context(directory, plan).records]


def test_what_is_to_be_encoded_is_computed_even_if_it_has_a_record(directory: Directory) -> None:
    spans = (Span("fact", 3, 5, "handle", ALICE),)
    assert names(EncodePlan((HEADER, FACT), spans, ALICE, "store"), directory) == ["header"]
    spans = (Span("other", 4, 5, "handle", ALICE),)
    assert names(EncodePlan((HEADER, FACT), spans, ALICE, "store"), directory) == ["header"]
    spans = (Span("other", 2, 5, "handle", ALICE),)
    assert names(EncodePlan((HEADER, FACT), spans, ALICE, "store"), directory) == []
    spans = (Span("other", 5, 6, "handle", ALICE),)
    assert names(EncodePlan((HEADER, FACT, REST), spans, ALICE, "store"), directory) == ["header", "fact"]


def test_the_last_token_is_always_computed(directory: Directory) -> None:
    def find(*segments: Segment) -> tuple[int, int, tuple[Miss, ...]]:
        found = find_records(directory, PromptPlan(segments, ALICE, "store"))
        return found.facts, found.tokens, found.missed

    assert find(HEADER, FACT, REST) == (1, 5, ())
    assert find(HEADER, FACT) == (1, 4, ())
    assert find(HEADER, SHORT) == (0, 3, (Miss("short handle", LAST),))
    assert find(HEADER, SHORT, FACT) == (2, 5, ())
