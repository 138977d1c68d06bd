from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from gated_engine import PATIENCE, GatedEngine, until
from hypothesis import given
from hypothesis import strategies as st
from recorder_helpers import ALICE, BOB, KEY, forged, new_fact
from small_index import SmallIndex

from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import (
    BudgetError,
    ConfigError,
    EngineClosedError,
    FactError,
    InputError,
    PromptTooLongError,
)
from inferscale_mem.handles import UNKNOWN, HandleSigner, find_broken
from inferscale_mem.kv.directory import ABSENT, BEHIND
from inferscale_mem.service import FOREIGN, MIXED, NO_CONNECTOR, NOT_INJECTED, TEXT_TAIL, MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Chunk, EncodePlan, Fact, InjectReport, Miss, PromptPlan, Sampling, Scope, Segment

SHORT = Sampling(max_tokens=2, temperature=0.0)
QUESTION = {"role": "user", "content": "What may I not eat?"}


class House:
    """A service with all that is around it."""

    def __init__(
        self, *, config: EncodingConfig | None = None, info: dict[str, Any] | None = None, **fake: Any
    ) -> None:
        self.fake = FakeEngine(key=KEY, **fake)
        self.engine = GatedEngine(self.fake, **(info or {}))
        self.signer = HandleSigner(KEY, "tests")
        self.index = SmallIndex(self.signer)
        self.service = MemoryService(self.engine, self.index, self.signer, config or EncodingConfig())

    def remember(self, *facts: Fact, wait: bool = True) -> list[str]:
        """Store and encode facts; their handles."""
        self.index.put(*facts)
        self.service.add(facts)
        assert not wait or self.service.wait(PATIENCE)
        return [self.service.handle(fact) for fact in facts]

    def ask(self, handles: Sequence[str] = (), scope: Scope | None = None, system: str = "") -> InjectReport:
        lead = [{"role": "system", "content": system}] if system else []
        plan = self.service.plan([*lead, QUESTION], handles, scope)
        *_, last = self.service.generate(plan, SHORT)
        assert last.report is not None
        return last.report

    def close(self) -> None:
        self.engine.encodes.open()
        self.service.close()
        self.fake.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def reasons(report: InjectReport) -> dict[str, str]:
    assert len({miss.handle for miss in report.missed}) == len(report.missed), "a handle is listed twice"
    return {miss.handle: miss.reason for miss in report.missed}


# Facts.


def test_an_encoding_policy_that_cannot_be_read_is_refused_at_once() -> None:
    fake = FakeEngine()
    signer = HandleSigner(KEY, "tests")
    with pytest.raises(ConfigError, match="nonsense"):
        MemoryService(fake, SmallIndex(signer), signer, EncodingConfig(policy="nonsense"))
    fake.close()


@pytest.mark.parametrize("text", ["", " ", "\n\t\u00a0", "\u200b\u200d\ufeff", "\x00\x1b"])
def test_a_fact_with_nothing_to_read_is_refused(house: House, text: str) -> None:
    with pytest.raises(FactError, match="empty"):
        house.service.check_fact(text)


@pytest.mark.parametrize("text", ["\ud83d", "half \udca9 a character", "\udfff\ud800"])
def test_lone_surrogates_are_refused(house: House, text: str) -> None:
    with pytest.raises(FactError, match="surrogate"):
        house.service.check_fact(text)


@pytest.mark.parametrize("text", ["🥜", "👩‍👩‍👧", "tea", "שלום", "two\nlines", "<|end|>"])
def test_ordinary_facts_are_fine(house: House, text: str) -> None:
    house.service.check_fact(text)


def test_a_fact_of_too_many_tokens_is_refused_by_setting_and_by_default() -> None:
    for config, limit in ((EncodingConfig(max_fact_tokens=20), 20), (EncodingConfig(), 1024)):
        house = House(config=config, max_model_len=4096)
        house.service.check_fact("x" * (limit - 3))  # bullet and line break
        with pytest.raises(FactError, match=f"has {limit + 1} tokens, at most {limit}"):
            house.service.check_fact("x" * (limit - 2))
        with pytest.raises(FactError):
            house.service.check_fact("x" * 60_000)
        house.close()


def test_a_fact_larger_than_the_budget_is_refused_but_only_where_records_are_made() -> None:
    house = House(record_bytes=64 * 20)
    house.service.check_fact("x" * 17)
    with pytest.raises(BudgetError, match=r"raise engine\.record_bytes"):
        house.service.check_fact("x" * 18)
    house.close()
    house = House(connector=False)
    house.service.check_fact("x" * 18)
    house.close()


def test_records_of_other_engines_and_policies_have_other_ids() -> None:
    fact = new_fact()
    ids = set()
    for config, info in (
        (EncodingConfig(), {}),
        (EncodingConfig(policy="header"), {}),
        (EncodingConfig(), {"fingerprint": "other"}),
    ):
        house = House(config=config, info=info)
        ids.add(house.service.planner.record_id(house.service.handle(fact)))
        house.close()
    assert len(ids) == 3


# Resolving.


def test_handles_become_facts_each_once_in_the_given_order(house: House) -> None:
    facts = [new_fact() for _ in range(3)]
    a, b, c = house.remember(*facts)
    resolved = house.service.resolve([c, a, c, b])
    assert list(resolved.facts.items()) == [(c, facts[2]), (a, facts[0]), (b, facts[1])]
    assert resolved.missed == () and resolved.scope == ALICE


def test_unknown_stale_malformed_and_forged_handles_cannot_be_told_apart(house: House) -> None:
    fact, updated, deleted, never = new_fact(), new_fact(), new_fact(), new_fact()
    good, stale, gone = house.remember(fact, updated, deleted)
    house.index.put(replace(updated, revision="2"))
    house.index.take(deleted)
    other_key = HandleSigner(bytes(32), "tests").mint(fact)
    other_store = HandleSigner(KEY, "elsewhere").mint(fact)
    other_owner = HandleSigner(KEY, "tests").mint(replace(fact, scope=BOB))
    bad = [stale, gone, house.service.handle(never), forged(good), other_key, other_store, other_owner, "", "tea"]
    resolved = house.service.resolve([*bad, good], ALICE)
    assert resolved.facts == {good: fact}
    assert resolved.missed == tuple(Miss(handle, UNKNOWN) for handle in bad)


def test_a_scope_admits_what_it_covers(house: House) -> None:
    mine, my_run, other = new_fact(), new_fact(scope=replace(ALICE, run_id="1")), new_fact(scope=BOB)
    handles = house.remember(mine, my_run, other)
    admitted = house.service.resolve(handles, ALICE)
    assert list(admitted.facts.values()) == [mine, my_run]
    assert admitted.missed == (Miss(handles[2], FOREIGN),) and admitted.scope == ALICE
    narrow = house.service.resolve(handles, replace(ALICE, run_id="1"))
    assert list(narrow.facts.values()) == [my_run]


def test_without_a_scope_the_facts_must_share_an_owner(house: House) -> None:
    bot = "helper"
    alice, bob = new_fact(scope=replace(ALICE, agent_id=bot)), new_fact(scope=replace(BOB, agent_id=bot))
    run = new_fact(scope=replace(ALICE, run_id="1"))
    a, b, r = house.remember(alice, bob, run)
    assert house.service.resolve([a, r]).scope == ALICE
    mixed = house.service.resolve([a, b, forged(a)])
    assert mixed.facts == {} and mixed.scope is None
    assert {miss.handle: miss.reason for miss in mixed.missed} == {a: MIXED, b: MIXED, forged(a): UNKNOWN}
    both = house.service.resolve([a, b], Scope(agent_id=bot))
    assert list(both.facts) == [a, b], "whoever asks as the agent is shown what the agent knows"


def test_no_handles_resolve_to_nothing(house: House) -> None:
    assert house.service.resolve([]).facts == {}
    assert house.service.resolve([], BOB).scope == BOB


def test_a_handle_whose_fact_has_expired_takes_its_record_along(house: House) -> None:
    fact = new_fact()
    (handle,) = house.remember(fact)
    house.index.take(fact)  # as the index of an expired fact behaves
    house.service.resolve([handle])
    assert house.service.wait(PATIENCE)
    assert not house.service.recorder.is_ready(house.service.planner.record_id(handle))
    assert house.engine.dropped_handles == [handle]


# Planning.


def test_a_plan_takes_handles_from_system_messages_and_from_memories(house: House) -> None:
    facts = [new_fact(f"Fact number {n}.") for n in range(3)]
    a, b, c = house.remember(*facts)
    system = {"role": "system", "content": f"You are kind. Memories:\n- {a}\n- {b}\n"}
    plan = house.service.plan([system, {"role": "user", "content": f"What of {c}?"}], [b, c])
    assert [segment.handle for segment in plan.facts] == [c, b, a], "most similar last"
    assert plan.scope == ALICE and plan.store == "tests" and plan.missed == ()


def test_a_foreign_handle_reveals_nothing(house: House) -> None:
    secret = new_fact("The code is 4711.", BOB)
    (handle,) = house.remember(secret)
    mine = house.remember(new_fact())
    for scope in (ALICE, None):
        plan = house.service.plan([QUESTION], [handle, *mine], scope)
        assert "4711" not in house.engine.tokenizer.decode(plan.token_ids)
    report = house.ask([handle, *mine], ALICE)
    assert reasons(report) == {handle: FOREIGN} and report.facts_injected == 1
    assert "4711" not in str(report.as_dict())


async def test_planning_does_not_hold_up_the_loop(house: House) -> None:
    (handle,) = house.remember(new_fact())
    lookup = house.index.by_handle_id
    reached, go_on = threading.Event(), threading.Event()

    def slow(handle_id: str) -> Fact | None:
        reached.set()
        assert go_on.wait(PATIENCE)
        return lookup(handle_id)

    house.index.by_handle_id = slow  # type: ignore[method-assign]
    planning = asyncio.create_task(house.service.aplan([QUESTION], [handle]))
    assert await asyncio.to_thread(reached.wait, PATIENCE)
    go_on.set()  # only possible because the loop runs on
    assert [segment.handle for segment in (await planning).facts] == [handle]


# Answering.


def test_ready_facts_are_injected_and_all_others_are_named(house: House) -> None:
    good = house.remember(*(new_fact() for _ in range(3)))
    report = house.ask([*good, forged(good[0])])
    assert (report.facts_requested, report.facts_injected) == (4, 3)
    assert reasons(report) == {forged(good[0]): UNKNOWN}
    assert report.tokens_injected > 0 and report.ttft_ms is not None


async def test_the_async_face_does_the_same_on_any_loop(house: House) -> None:
    good = house.remember(new_fact(), new_fact())

    async def ask() -> InjectReport | None:
        plan = await house.service.aplan([QUESTION], [*good, "x"])
        return [chunk async for chunk in house.service.agenerate(plan, SHORT)][-1].report

    here = await asyncio.gather(ask(), ask(), asyncio.to_thread(asyncio.run, ask()))
    for report in here:
        assert report is not None and report.facts_injected == 2 and reasons(report) == {"x": UNKNOWN}


def test_a_question_right_after_add_is_answered_from_text_without_waiting(house: House) -> None:
    house.engine.encodes.shut()
    handles = house.remember(new_fact("Allergic to peanuts."), new_fact(), wait=False)
    plan = house.service.plan([QUESTION], handles)
    assert "Allergic to peanuts." in house.engine.tokenizer.decode(plan.token_ids)
    report = house.ask(handles)  # would not return if it waited for an encode
    assert report.facts_injected == 0 and reasons(report) == dict.fromkeys(handles, ABSENT)
    house.engine.encodes.open()
    assert house.service.wait(PATIENCE)
    assert house.ask(handles).facts_injected == 2


def test_a_fact_that_becomes_ready_during_the_answer_is_not_encoded_twice(house: House) -> None:
    house.engine.encodes.shut()
    handles = house.remember(new_fact(), wait=False)
    chunks = house.service.generate(house.service.plan([QUESTION], handles), SHORT)
    next(chunks)
    house.engine.encodes.open()
    assert house.service.wait(PATIENCE)
    *_, last = chunks
    assert last.report is not None and reasons(last.report) == {handles[0]: ABSENT}
    assert house.service.wait(PATIENCE)
    assert house.engine.encoded == handles


def test_facts_that_are_not_ready_do_not_cost_those_that_are(house: House) -> None:
    ready = house.remember(new_fact(), new_fact())
    house.ask(ready)
    house.engine.encodes.shut()
    late = house.remember(new_fact(), wait=False)
    report = house.ask([ready[0], *late, ready[1]])
    assert report.facts_injected == 2 and reasons(report) == {late[0]: ABSENT}


def test_requests_with_one_system_prompt_share_its_header(house: House) -> None:
    handles = house.remember(new_fact())
    before = len(house.engine.headers)
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda _: house.ask(handles, system="You are kind."), range(8)))
    assert [report.facts_injected for report in reports] == [1] * 8
    assert len(house.engine.headers) == before + 1


def test_an_evicted_header_is_made_again_for_the_next_request(house: House) -> None:
    handles = house.remember(new_fact())
    assert house.ask(handles, system="You are kind.").facts_injected == 1
    house.fake.evict_all()
    assert house.ask(handles, system="You are kind.").facts_injected == 0
    assert house.service.wait(PATIENCE)
    assert house.ask(handles, system="You are kind.").facts_injected == 1


def test_a_header_that_cannot_be_kept_is_visible_and_no_error() -> None:
    house = House(record_bytes=64 * 200)
    handles = house.remember(new_fact())
    report = house.ask(handles, system="x" * 300)
    assert report.facts_injected == 0 and reasons(report) == {handles[0]: BEHIND}
    assert any("budget" in reason for reason in house.service.recorder.failures.values())
    house.close()


def test_a_too_long_prompt_starts_nothing() -> None:
    house = House(max_model_len=300)
    handles = house.remember(new_fact())
    before = len(house.engine.plans)
    with pytest.raises(PromptTooLongError, match="1 memories"):
        house.ask(handles, system="x" * 300)
    assert len(house.engine.plans) == before and house.fake.requests == []
    house.close()


def test_the_text_tail_is_named_as_such() -> None:
    house = House(config=EncodingConfig(text_tail=2))
    handles = house.remember(*(new_fact() for _ in range(3)))
    report = house.ask(handles)
    assert report.facts_injected == 1
    assert reasons(report) == dict.fromkeys(handles[:2], TEXT_TAIL), "the most similar ones"
    house.close()


def test_a_text_tail_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale_mem.service.free_tokens", lambda engine: 10_000)
    house = House(config=EncodingConfig(text_tail="auto"))
    handles = house.remember(*(new_fact() for _ in range(3)))
    assert reasons(house.ask(handles)) == dict.fromkeys(handles, TEXT_TAIL)
    assert house.service.plan([QUESTION], handles, text_tail=1).facts[1].record is not None
    house.close()


def test_without_the_connector_every_fact_says_so() -> None:
    house = House(connector=False)
    handles = house.remember(new_fact("Allergic to peanuts."), new_fact())
    plan = house.service.plan([QUESTION], handles)
    assert "Allergic to peanuts." in house.engine.tokenizer.decode(plan.token_ids)
    report = house.ask([*handles, forged(handles[0])])
    assert (report.facts_requested, report.facts_injected) == (3, 0)
    assert reasons(report) == {**dict.fromkeys(handles, NO_CONNECTOR), forged(handles[0]): UNKNOWN}
    assert house.engine.plans == []
    house.close()


def test_why_a_fact_has_no_record_is_told(house: House) -> None:
    fact = new_fact()

    def broken(plan: EncodePlan) -> None:
        if plan.spans[0].handle:
            raise InputError("does not fit")

    house.engine.fail = broken
    handles = house.remember(fact)
    assert reasons(house.ask(handles)) == {handles[0]: f"{ABSENT}: does not fit"}


def test_a_closed_engine_is_an_error_not_an_empty_answer(house: House) -> None:
    handles = house.remember(new_fact())
    plan = house.service.plan([QUESTION], handles)
    house.fake.close()
    with pytest.raises(EngineClosedError):
        list(house.service.generate(plan, SHORT))


def test_leaving_an_answer_early_ends_the_request(house: House) -> None:
    plan = house.service.plan([QUESTION], house.remember(new_fact()))
    started = []
    generate = house.fake.generate

    def watched(plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        started.append(generate(plan, sampling))  # held here, so that it does not end by being forgotten
        return started[-1]

    house.fake.generate = watched  # type: ignore[method-assign]
    chunks = house.service.generate(plan, Sampling(max_tokens=500))
    next(chunks)
    chunks.close()
    house.fake.evict_all()
    assert house.engine.status().records == 0, "a request that still ran would hold its records"


async def test_leaving_an_async_answer_early_ends_the_request(house: House) -> None:
    plan = await house.service.aplan([QUESTION], house.remember(new_fact()))
    started = []
    agenerate = house.fake.agenerate

    def watched(plan: PromptPlan, sampling: Sampling) -> AsyncIterator[Chunk]:
        started.append(agenerate(plan, sampling))
        return started[-1]

    house.fake.agenerate = watched  # type: ignore[method-assign]
    chunks = house.service.agenerate(plan, Sampling(max_tokens=500))
    await anext(chunks)
    await chunks.aclose()

    def released() -> bool:
        house.fake.evict_all()
        return house.engine.status().records == 0

    await asyncio.to_thread(until, released)  # the engine ends the request on its own loop


def test_the_engine_stays_open_when_the_service_is_closed(house: House) -> None:
    handles = house.remember(new_fact())
    house.service.close()
    house.service.close()
    assert house.ask(handles).facts_injected == 1


# Accounting.


def fact_segments(count: int, recorded: Callable[[int], bool]) -> tuple[Segment, ...]:
    return tuple(Segment("fact", (1, 2), f"r{n}" if recorded(n) else None, f"h{n}") for n in range(count))


@given(
    facts=st.lists(st.booleans(), max_size=6),
    plan_missed=st.lists(st.integers(0, 9), max_size=6),
    engine_missed=st.lists(st.integers(0, 9), max_size=6),
    injected=st.integers(0, 9),
)
def test_whatever_plan_and_engine_say_each_handle_is_counted_once(
    facts: list[bool], plan_missed: list[int], engine_missed: list[int], injected: int
) -> None:
    segments = fact_segments(len(facts), facts.__getitem__)
    plan = PromptPlan(segments, ALICE, "tests", tuple(Miss(f"h{n}", UNKNOWN) for n in plan_missed))
    said = InjectReport(99, injected, 0, 9, tuple(Miss(f"h{n}", BEHIND) for n in engine_missed), 1.5)
    report = SERVICE.account(plan, said)
    requested = {f"h{n}" for n in range(len(facts))} | {f"h{n}" for n in plan_missed}
    missed = reasons(report)
    assert report.facts_requested == len(requested) == report.facts_injected + len(missed)
    assert set(missed) <= requested
    assert report.facts_injected <= injected
    assert {f"h{n}" for n in plan_missed} <= set(missed)
    assert {f"h{n}" for n, recorded in enumerate(facts) if not recorded} <= set(missed)
    assert (report.tokens_prefilled, report.ttft_ms) == (9, 1.5)


def test_a_fact_the_engine_does_not_speak_of_is_missed_too() -> None:
    plan = PromptPlan(fact_segments(3, lambda n: True), ALICE, "tests")
    report = SERVICE.account(plan, InjectReport(3, 1, 0, 9, (Miss("h2", BEHIND),)))
    assert report.facts_injected == 1 and reasons(report) == {"h1": NOT_INJECTED, "h2": BEHIND}


def test_a_fact_the_engine_names_as_missed_is_not_counted_as_injected() -> None:
    plan = PromptPlan(fact_segments(2, lambda n: True), ALICE, "tests")
    report = SERVICE.account(plan, InjectReport(2, 1, 0, 9, (Miss("h0", BEHIND),)))
    assert report.facts_injected == 1 and reasons(report) == {"h0": BEHIND}


KINDS = ("ready", "queued", "stale", "deleted", "forged", "foreign", "never", "garbage")


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2)), max_size=12), st.booleans(), st.booleans())
def test_every_handle_of_a_request_is_injected_or_missed(
    wanted: list[tuple[str, int]], scoped: bool, in_system_message: bool
) -> None:
    handles = [HANDLES[kind][number] for kind, number in wanted]
    scope = ALICE if scoped else None
    if in_system_message:
        report = HOUSE.ask((), scope, system="Memories:\n" + "\n".join(f"- {h}" for h in handles) + "\nBe kind.")
        distinct = {handle for handle in handles if handle not in HANDLES["garbage"] or find_broken(handle)}
    else:
        report, distinct = HOUSE.ask(handles, scope), set(handles)
    missed = reasons(report)
    injected = distinct - set(missed)
    mixed = not scoped and {"foreign"} < {kind for kind, _ in wanted if kind in ("foreign", "ready", "queued")}
    expected = set() if mixed else set(HANDLES["ready"]) | (set() if scoped else set(HANDLES["foreign"]))
    assert report.facts_requested == len(distinct)
    assert report.facts_injected == len(injected)
    assert injected == distinct & expected


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """One house for the property tests, in which two owners' facts are ready and some are held in the queue."""
    global HOUSE, SERVICE, HANDLES
    HOUSE = House()
    SERVICE = HOUSE.service
    facts = {kind: [new_fact(scope=BOB if kind == "foreign" else ALICE) for _ in range(3)] for kind in KINDS}
    HANDLES = {kind: [SERVICE.handle(fact) for fact in facts[kind]] for kind in KINDS}
    for kind in ("ready", "foreign", "stale", "deleted", "forged"):
        HOUSE.remember(*facts[kind])
    for fact in facts["stale"]:
        HOUSE.index.put(replace(fact, revision="2"))
    HOUSE.index.take(*facts["deleted"])
    SERVICE.remove([*facts["stale"], *facts["deleted"]])
    assert SERVICE.wait(PATIENCE)
    HANDLES["forged"] = [forged(handle) for handle in HANDLES["forged"]]
    HANDLES["garbage"] = ["tea", "ism1.short.tag", "é"]
    HOUSE.engine.refuse = lambda plan: "held back" if plan.spans[0].handle in HANDLES["queued"] else None
    HOUSE.remember(*facts["queued"])
    yield
    HOUSE.close()


HOUSE: House
SERVICE: MemoryService
HANDLES: dict[str, list[str]]
