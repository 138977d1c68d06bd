"""The scheduler side by itself, with as much of vLLM's requests and steps as it looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inferscale_mem import wire
from inferscale_mem.kv.connector.metadata import WorkerReport
from inferscale_mem.kv.connector.scheduler import KEPT, SchedulerSide
from inferscale_mem.kv.directory import ABSENT, DROPPED, Directory
from inferscale_mem.types import EncodePlan, PromptPlan, Scope, Segment, Span

OWNER = Scope(user_id="ann")
TOKENS = tuple(range(1, 13))


def handle(letter: str) -> str:
    return f"ism1.{letter * 16}.{'b' * 16}"


def an_encode(letter: str) -> dict[str, Any]:
    span = Span(f"{letter * 16}.f", 0, len(TOKENS), handle(letter), OWNER)
    return wire.encode_params(EncodePlan((Segment("fact", TOKENS, None, handle(letter)),), (span,), OWNER, "store"))


def request(name: str, tokens: tuple[int, ...], params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=list(tokens), num_prompt_tokens=len(tokens),
        mm_features=None, lora_request=None, skip_reading_prefix_cache=False, cache_salt=None, block_hashes=[],
        update_block_hashes=lambda: None,
    )  # fmt: skip


def step(first: int, **scheduled: int) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=first) for name in scheduled],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: ([1],)),
    )


def test_a_record_dropped_while_it_is_made_keeps_its_pages_to_the_end() -> None:
    side = SchedulerSide(Directory(4, 8, 1), 1, [])
    encode, drop = request("e", TOKENS, an_encode("a")), request("d", (0,), wire.drop_params([handle("a")]))
    side.on_new_request(encode)
    (first,) = side.build_step(step(0, e=5)).captures
    side.on_new_request(drop)
    other = request("o", TOKENS, an_encode("c"))
    side.on_new_request(other)
    later = side.build_step(step(5, e=7))
    (last,) = later.captures
    assert last.final and last.rows.pages == first.rows.pages and len(last.rows.pages) == 2
    assert not later.erase, "what is still being kept there would be erased too early"
    (others,) = side.build_step(step(0, o=len(TOKENS))).captures
    assert not set(others.rows.pages) & set(first.rows.pages)
    side.update_output(WorkerReport(), None)
    answer = side.request_finished(encode)
    assert answer is not None and answer[wire.KEY]["refused"] == {f"{'a' * 16}.f": DROPPED}
    assert sorted(side.build_step(step(0)).erase) == sorted(first.rows.pages)
    assert side.directory.records == 0


def test_the_answer_to_an_aborted_request_can_be_asked_for_once() -> None:
    side = SchedulerSide(Directory(4, 8, 1), 1, [])
    plan = PromptPlan((Segment("fact", TOKENS, "r", handle("a")),), OWNER, "store")
    wanted = {"tokens_injected": 0, "facts_injected": 0, "missed": [[handle("a"), ABSENT]]}

    def ask(ticket: str) -> Any:
        asking = request("q", (0,), wire.report_params(ticket))
        side.on_new_request(asking)
        answer = side.request_finished(asking)
        assert answer is not None
        return {name: value for name, value in answer[wire.KEY].items() if name not in ("v", "op")}

    aborted = request("a", TOKENS, wire.inject_params(plan, "one"))
    side.on_new_request(aborted)
    assert ask("one") == wanted, "the abort may come later than the question"
    side.request_finished(aborted)
    assert "error" in ask("two") and ask("one") == wanted
    assert "error" in ask("one")
    for number in range(KEPT + 1):
        more = request("a", TOKENS, wire.inject_params(plan, f"n{number}"))
        side.on_new_request(more)
        side.request_finished(more)
    assert "error" in ask("n0") and ask("n1") == wanted


def test_a_record_that_was_made_can_be_evicted_afterwards() -> None:
    side = SchedulerSide(Directory(2, 8, 1), 1, [])
    for letter in "ac":
        encode = request("e", TOKENS, an_encode(letter))
        side.on_new_request(encode)
        (capture,) = side.build_step(step(0, e=len(TOKENS))).captures
        side.request_finished(encode)
        report = WorkerReport()
        report.done[capture.generation] += 1
        side.update_output(report, None)
    assert side.directory.records == 1 and side.directory.counters["evicted"] == 1
