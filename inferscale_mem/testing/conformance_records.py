"""Records: made, matched, injected, refused, forgotten."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from inferscale_mem.errors import InputError
from inferscale_mem.protocols import Engine
from inferscale_mem.testing.scene import (
    ALICE,
    BOB,
    FIRST_TOKEN,
    STORE,
    Memory,
    Scene,
    Segment,
    Span,
    difference,
    plain,
    raises,
)
from inferscale_mem.types import EncodePlan, PromptPlan, Scope

FACT_TOKENS = 64
"""A multiple of any page size, so that budgets can be given in facts."""
FAKE_HANDLE = "ism1.0123456789abcdef.0123456789abcdef"


class RecordConformance:
    """See ``conformance.EngineConformance``."""

    exact_tolerance = 1e-3
    computes = True
    given_up_s = 0.0
    """Seconds until an engine must have let go of what a closed stream held; over a network it hears of that later."""

    def test_what_was_encoded_is_injected_and_reported(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(3)
        scene.encode_all(memories)
        answer = scene.ask(scene.plan(memories))
        assert answer.report.facts_requested == answer.report.facts_injected == 3
        assert answer.report.tokens_prefilled == len(scene.suffix.token_ids)
        assert answer.report.missed == ()

    def test_records_of_the_exact_prefix_answer_like_plain_prefill(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(4)
        scene.encode_all(memories)
        plan = scene.plan(memories)
        assert difference(scene.ask(plan, FIRST_TOKEN), scene.ask(plain(plan), FIRST_TOKEN)) < self.exact_tolerance
        assert scene.ask(plan).tokens == scene.ask(plain(plan)).tokens

    def test_facts_encoded_on_records_of_those_before_them(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(3)
        scene.encode_header()
        for i, memory in enumerate(memories):
            report = scene.encode([memory], context=memories[:i])
            assert report.encoded == (memory.record,)
            assert report.based_on == (scene.header.record, *(earlier.record for earlier in memories[:i]))
            assert report.tokens_prefilled == len(memory.segment.token_ids)
        plan = scene.plan(memories)
        answer = scene.ask(plan, FIRST_TOKEN)
        assert answer.report.facts_injected == 3
        assert difference(answer, scene.ask(plain(plan), FIRST_TOKEN)) < self.exact_tolerance

    def test_encoding_says_what_it_prefilled_where_context_has_no_record(self, engine: Engine) -> None:
        scene = Scene(engine)
        first, second = scene.memories(2)
        report = scene.encode([second], context=[first])
        assert (report.encoded, report.based_on, report.tokens_injected) == ((second.record,), (), 0)
        total = len(scene.header.token_ids) + len(first.segment.token_ids) + len(second.segment.token_ids)
        assert report.tokens_prefilled == total

    def test_encoded_twice_the_later_tokens_count(self, engine: Engine) -> None:
        scene = Scene(engine)
        old = scene.memory("Likes tea.")
        new = old.with_tokens(scene.memory("Likes coffee.").segment.token_ids)
        scene.encode_all([old])
        assert scene.encode([new]).encoded == (new.record,)
        assert scene.ask(scene.plan([new])).report.facts_injected == 1
        _expect_miss(scene, scene.plan([old]), old)

    def test_status_counts_what_is_held(self, engine: Engine) -> None:
        scene = Scene(engine)
        before = engine.status()
        memory = scene.memory("Likes to be counted.")
        scene.encode([memory])
        scene.ask(scene.plan([memory], header=False))
        after = engine.status()
        assert after.records == before.records + 1
        assert after.tokens == before.tokens + len(memory.segment.token_ids)
        assert after.bytes >= before.bytes + len(memory.segment.token_ids) * engine.info.bytes_per_token
        assert after.counters["encoded"] == before.counters.get("encoded", 0) + 1
        assert after.counters["injected"] == before.counters.get("injected", 0) + 1

    def test_a_missing_record_is_prefilled_with_a_reason(self, engine: Engine) -> None:
        scene = Scene(engine)
        first, missing, last = scene.memories(3)
        scene.encode_all([first])
        scene.encode([last])
        plan = scene.plan([first, missing, last])
        answer = scene.ask(plan)
        assert answer.report.facts_injected == 1
        assert {miss.handle for miss in answer.report.missed} == {missing.handle, last.handle}
        assert all(miss.reason for miss in answer.report.missed)
        assert answer.report.tokens_injected == len(scene.header.token_ids) + len(first.segment.token_ids)
        assert answer.tokens == scene.ask(plain(plan)).tokens

    def test_a_dropped_fact_is_never_injected_again(self, engine: Engine) -> None:
        scene = Scene(engine)
        kept, dropped = scene.memories(2)
        scene.encode_all([kept, dropped])
        held = engine.status().records
        engine.drop([dropped.handle])
        assert engine.status().records == held - 1
        answer = scene.ask(scene.plan([kept, dropped]))
        assert answer.report.facts_injected == 1
        assert [miss.handle for miss in answer.report.missed] == [dropped.handle]
        engine.drop([])
        engine.drop([dropped.handle, FAKE_HANDLE])
        assert scene.ask(scene.plan([kept])).report.facts_injected == 1

    def test_facts_of_another_owner_stay_text(self, engine: Engine) -> None:
        scene = Scene(engine)
        memory = scene.memory("Likes to be left alone.")
        scene.encode_all([memory])
        _expect_miss(scene, scene.plan([memory], scope=BOB), memory)
        _expect_miss(scene, scene.plan([memory], scope=Scope(user_id="alice", run_id="1")), memory)
        _expect_miss(scene, scene.plan([memory], scope=None), memory)
        _expect_miss(scene, scene.plan([memory], store="another store"), memory)
        assert scene.ask(scene.plan([memory])).report.facts_injected == 1

    def test_a_wider_scope_sees_facts_of_every_run(self, engine: Engine) -> None:
        scene = Scene(engine)
        memory = scene.memory("Likes runs.", Scope(user_id="alice", run_id="1"))
        scene.encode_all([memory])
        assert scene.ask(scene.plan([memory], scope=ALICE)).report.facts_injected == 1

    def test_a_forged_handle_gets_nothing(self, engine: Engine) -> None:
        scene = Scene(engine)
        memory = scene.memory("Likes secrets.")
        scene.encode_all([memory])
        forged = memory.with_handle(FAKE_HANDLE)
        _expect_miss(scene, scene.plan([forged]), forged)
        assert engine.info.verifies_handles
        report = scene.encode([dataclasses.replace(memory, scope=BOB)])
        assert report.encoded == ()
        assert report.refused[memory.record]

    def test_other_tokens_than_the_records_are_prefilled(self, engine: Engine) -> None:
        scene = Scene(engine)
        memory = scene.memory("Likes tea.")
        scene.encode_all([memory])
        changed = memory.with_tokens(scene.memory("Likes cat.").segment.token_ids)
        _expect_miss(scene, scene.plan([changed]), changed)

    def test_a_prompt_of_records_alone_still_computes_its_last_token(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        scene.encode_all(memories)
        plan = PromptPlan(scene.plan(memories).segments[:-1], ALICE, STORE)
        answer = scene.ask(plan, FIRST_TOKEN)
        assert answer.report.tokens_prefilled == 1
        assert difference(answer, scene.ask(plain(plan), FIRST_TOKEN)) < self.exact_tolerance

    def test_a_suffix_of_one_token(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        scene.encode_all(memories)
        plan = scene.plan(memories, suffix=Segment("text", scene.suffix.token_ids[:1]))
        answer = scene.ask(plan, FIRST_TOKEN)
        assert (answer.report.facts_injected, answer.report.tokens_prefilled) == (2, 1)
        assert difference(answer, scene.ask(plain(plan), FIRST_TOKEN)) < self.exact_tolerance

    def test_plain_text_after_an_injected_request_is_unaffected(self, engine: Engine) -> None:
        scene = Scene(engine)
        moved = scene.memories(3)
        exact = [scene.twin(memory) for memory in moved]
        scene.encode_header()
        for memory in moved:
            scene.encode([memory], header=False)
        injected = scene.ask(scene.plan(moved), FIRST_TOKEN)
        assert injected.report.facts_injected == 3
        after = scene.ask(plain(scene.plan(moved)), FIRST_TOKEN)
        scene.encode(exact)
        clean = scene.ask(scene.plan(exact), FIRST_TOKEN)
        assert clean.report.facts_injected == 3
        assert difference(after, clean) < self.exact_tolerance
        if self.computes:
            assert difference(injected, after) > self.exact_tolerance

    def test_spans_that_do_not_fit_are_refused_at_once(self, engine: Engine) -> None:
        scene = Scene(engine)
        segment = Segment("text", scene.suffix.token_ids)
        length = len(segment.token_ids)
        for edges in ([(2, length + 1)], [(3, 3)], [(-1, 3)], [(0, 4), (3, 5)], [(4, 6), (0, 2)], []):
            spans = tuple(Span(f"span{i}", start, end) for i, (start, end) in enumerate(edges))
            with raises(InputError):
                engine.encode(EncodePlan((segment,), spans))
        long = Segment("text", segment.token_ids[:1] * (engine.info.max_model_len + 1))
        with raises(InputError):
            engine.encode(EncodePlan((long,), (Span("span", 0, 1),)))

    def test_the_budget_is_kept_and_the_least_recently_used_go(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(record_tokens=3 * FACT_TOKENS)
        scene = Scene(engine)
        a, b, c, d, e, *more = [scene.memory_of(FACT_TOKENS) for _ in range(8)]
        for memory in (a, b, c):
            assert scene.encode([memory], header=False).encoded == (memory.record,)
        assert scene.ask(scene.plan([a], header=False)).report.facts_injected == 1
        assert scene.encode([d], header=False).encoded == (d.record,)
        found = {m.record: scene.ask(scene.plan([m], header=False)).report.facts_injected for m in (a, b, c, d)}
        assert found == {a.record: 1, b.record: 0, c.record: 1, d.record: 1}
        assert engine.status().bytes <= engine.info.record_bytes
        assert engine.status().counters["evicted"] == 1
        huge = scene.memory_of(3 * FACT_TOKENS + 1)
        report = scene.encode([huge], header=False)
        assert report.encoded == () and report.refused[huge.record]
        assert scene.ask(scene.plan([d], header=False)).report.facts_injected == 1
        # What is done, or was given up, holds on to nothing; an engine that is far away hears of it a little later.
        assert scene.encode([e], context=[d], header=False).based_on == (d.record,)
        chunks = iter(engine.generate(scene.plan([d], header=False), dataclasses.replace(FIRST_TOKEN, max_tokens=20)))
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        wanted, deadline = tuple(memory.record for memory in more), time.monotonic() + self.given_up_s
        while (made := scene.encode(more, header=False).encoded) != wanted and time.monotonic() < deadline:
            pass
        assert made == wanted

    def test_without_records_memories_are_text_and_everyone_can_see_it(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        engine = make_engine(connector=False)
        scene = Scene(engine)
        memories = scene.memories(2)
        assert not engine.info.connector
        report = scene.encode(memories)
        assert report.encoded == () and set(report.refused) == {memory.record for memory in memories}
        answer = scene.ask(scene.plan(memories))
        assert (answer.report.facts_requested, answer.report.facts_injected) == (2, 0)
        missed = {miss.handle: miss.reason for miss in answer.report.missed}
        assert all(missed[memory.handle] for memory in memories)
        engine.drop([memories[0].handle])
        assert engine.status().records == 0


def _expect_miss(scene: Scene, plan: PromptPlan, memory: Memory) -> None:
    answer = scene.ask(plan)
    assert answer.report.facts_injected == 0
    assert [miss.handle for miss in answer.report.missed] == [memory.handle]
    assert answer.report.missed[0].reason
