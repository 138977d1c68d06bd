"""Strict mode: handles that expire, from the service to the chat model, and beside an instance that is not strict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gated_engine import PATIENCE
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from recorder_helpers import ALICE, BOB, KEY, forged, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import InputError
from inferscale_mem.handles import ENDLESS, EXPIRED, UNKNOWN, HandleSigner
from inferscale_mem.service import FOREIGN, MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Fact, Sampling

MINUTE = 60
NOW = 1_800_000_000.5


class Clock:
    """A time that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Pair:
    """Two services on one key, index and engine: one strict, one not; and the chat model of each."""

    def __init__(self) -> None:
        self.engine = FakeEngine(key=KEY)
        self.clock = Clock()
        self.index = SmallIndex(HandleSigner(KEY, "tests"))
        self.strict, self.lax = (
            MemoryService(self.engine, self.index, HandleSigner(KEY, "tests", after, self.clock), EncodingConfig())
            for after in (MINUTE, None)
        )
        self.chat, self.lax_chat = ChatInferScale(service=self.strict), ChatInferScale(service=self.lax)

    def remember(self, text: str, owner: Any = ALICE) -> Fact:
        fact = new_fact(text, owner)
        self.index.put(fact)
        self.strict.add([fact])
        self.strict.wait(PATIENCE)
        return fact

    @property
    def prompt(self) -> str:
        return self.engine.tokenizer.decode(self.engine.requests[-1][0].token_ids)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for service in (made.strict, made.lax):
        service.close()
    made.engine.close()


def report(answer: Any) -> dict[str, Any]:
    """What an answer says, its misses as handle -> reason."""
    said = answer.response_metadata["inferscale"]
    return {**said, "missed": {miss["handle"]: miss["reason"] for miss in said["missed"]}}


QUESTION = HumanMessage("What may I not eat?")


def test_an_expiring_handle_is_injected_until_its_time(pair: Pair) -> None:
    fact = pair.remember("Allergic to peanuts.")
    handle = pair.strict.handle(fact)
    assert handle != pair.strict.signer.mint(fact) and len(handle.split(".")) == 4
    pair.clock.now += MINUTE
    said = report(pair.chat.invoke([SystemMessage(f"Memories:\n- {handle}"), QUESTION]))
    assert (said["facts_requested"], said["facts_injected"], said["missed"]) == (1, 1, {})
    assert "Allergic to peanuts." in pair.prompt and "ism1" not in pair.prompt
    pair.clock.now += 1
    said = report(pair.chat.invoke([SystemMessage(f"Memories:\n- {handle}"), QUESTION]))
    assert (said["facts_requested"], said["facts_injected"], said["missed"]) == (1, 0, {handle: EXPIRED})
    assert "peanuts" not in pair.prompt and handle in pair.prompt, "inert text, as any that is not valid"
    assert report(pair.chat.invoke([QUESTION], memories=[handle]))["missed"] == {handle: EXPIRED}
    assert pair.strict.resolve([handle]).facts == {}


def test_the_record_is_the_same_whatever_the_handle(pair: Pair) -> None:
    fact = pair.remember("Allergic to peanuts.")
    for _ in range(3):
        pair.clock.now += 10 * MINUTE
        said = report(pair.chat.invoke([QUESTION], memories=[pair.strict.handle(fact)]))
        assert said["facts_injected"] == 1
    assert pair.engine.status().records == len(pair.engine.encodes) == 2, "the fact's and the header's"


def test_strict_mode_takes_no_handle_that_does_not_expire(pair: Pair) -> None:
    fact = pair.remember("Allergic to peanuts.")
    lasting = pair.lax.handle(fact)
    assert lasting == pair.strict.signer.mint(fact)
    assert report(pair.lax_chat.invoke([QUESTION], memories=[lasting]))["facts_injected"] == 1
    said = report(pair.chat.invoke([QUESTION], memories=[lasting]))
    assert said["facts_injected"] == 0 and said["missed"] == {lasting: ENDLESS}
    assert "peanuts" not in pair.prompt


def test_an_instance_that_is_not_strict_heeds_the_end_of_anothers_handles(pair: Pair) -> None:
    handle = pair.strict.handle(pair.remember("Allergic to peanuts."))
    assert report(pair.lax_chat.invoke([QUESTION], memories=[handle]))["facts_injected"] == 1
    pair.clock.now += MINUTE + 1
    assert report(pair.lax_chat.invoke([QUESTION], memories=[handle]))["missed"] == {handle: EXPIRED}
    assert "peanuts" not in pair.prompt


def test_two_handles_of_one_fact_are_served_once(pair: Pair) -> None:
    fact, other = pair.remember("Allergic to peanuts."), pair.remember("Likes tea.")
    early = pair.strict.handle(fact)
    pair.clock.now += MINUTE / 2
    late, tea = pair.strict.handle(fact), pair.strict.handle(other)
    assert early != late
    system = SystemMessage(f"Memories:\n- {early}\n- {tea}\n- {late}")
    said = report(pair.chat.invoke([system, QUESTION], memories=[late]))
    assert (said["facts_requested"], said["facts_injected"], said["missed"]) == (2, 2, {})
    assert pair.prompt.count("peanuts") == 1 and "ism1" not in pair.prompt
    pair.clock.now += MINUTE / 2 + 1
    said = report(pair.chat.invoke([system, QUESTION], memories=[late]))
    assert said["facts_injected"] == 2 and said["missed"] == {early: EXPIRED}
    assert pair.prompt.count("peanuts") == 1


def test_what_the_engine_has_lost_is_reported_by_the_handle_that_asked(pair: Pair) -> None:
    handle = pair.strict.handle(pair.remember("Allergic to peanuts."))
    pair.engine.evict_all()
    said = report(pair.chat.invoke([QUESTION], memories=[handle]))
    assert said["facts_injected"] == 0 and list(said["missed"]) == [handle]
    assert "Allergic to peanuts." in pair.prompt, "slower, never wrong"
    assert pair.strict.wait(PATIENCE)
    assert report(pair.chat.invoke([QUESTION], memories=[handle]))["facts_injected"] == 1, "and it was made again"


def test_why_encoding_failed_is_told_by_the_handle_that_asked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Any) -> Any:
        raise InputError("the engine is in a bad mood")

    monkeypatch.setattr(pair.engine, "encode", refuse)
    handle = pair.strict.handle(pair.remember("Allergic to peanuts."))
    missed = report(pair.chat.invoke([QUESTION], memories=[handle]))["missed"]
    assert list(missed) == [handle] and "bad mood" in missed[handle]


def test_only_genuine_handles_are_told_that_they_have_expired(pair: Pair) -> None:
    fact, gone = pair.remember("Allergic to peanuts."), pair.remember("Likes tea.")
    foreign = pair.strict.handle(pair.remember("Has a secret.", BOB))
    good, deleted = pair.strict.handle(fact), pair.strict.handle(gone)
    pair.index.take(gone)
    prefix, name, expiry, tag = good.split(".")
    longer = f"{prefix}.{name}.{int(expiry) + 1}.{tag}"
    lasting_tag = pair.strict.signer.mint(fact).split(".")[2]
    bad = [forged(good), deleted, longer, f"{prefix}.{name}.{expiry}.{lasting_tag}", f"{prefix}.{name}.{tag}"]
    reasons = {miss.handle: miss.reason for miss in pair.strict.resolve([*bad, foreign, good], ALICE).missed}
    assert reasons == {**dict.fromkeys(bad, UNKNOWN), foreign: FOREIGN}
    pair.clock.now += 2 * MINUTE
    reasons = {miss.handle: miss.reason for miss in pair.strict.resolve([*bad, foreign, good], ALICE).missed}
    assert reasons == {**dict.fromkeys(bad, UNKNOWN), foreign: EXPIRED, good: EXPIRED}


def test_the_cache_key_of_an_answer_changes_as_a_handle_expires(pair: Pair) -> None:
    handle = pair.strict.handle(pair.remember("Allergic to peanuts."))
    messages = [{"role": "system", "content": handle}, {"role": "user", "content": "?"}]
    assert pair.strict.alive(messages) == (handle,)
    pair.clock.now += MINUTE + 1
    assert pair.strict.alive(messages) == ()


@pytest.mark.parametrize("service", ["strict", "lax"])
def test_a_handle_that_is_split_over_blocks_does_not_reach_the_model_whole(pair: Pair, service: str) -> None:
    """Pieces of one AI text are put together, and the handle is cut; in other messages the halves name nothing."""
    chat = pair.chat if service == "strict" else pair.lax_chat
    handle = getattr(pair, service).handle(pair.remember("Allergic to peanuts."))
    for cut in range(1, len(handle)):
        blocks: Any = [{"type": "text", "text": handle[:cut]}, {"type": "text", "text": handle[cut:]}]
        chat.invoke([HumanMessage("Hi."), AIMessage(blocks), HumanMessage("Go on.")], memories=[handle])
        assert "ism1." not in pair.prompt
        said = report(chat.invoke([HumanMessage(blocks)], user_id="alice", human_handles=True))
        assert handle not in pair.prompt and "peanuts" not in pair.prompt and said["facts_injected"] == 0
        assert handle not in said["missed"]  # a half may be counted, as what it is


def test_the_engine_itself_takes_lasting_handles_only(pair: Pair) -> None:
    """Records are named after them; an order that shows an expiring one was not made by this package."""
    fact = pair.remember("Allergic to peanuts.")
    handle = pair.strict.handle(fact)
    plan = pair.strict.plan([{"role": "user", "content": "?"}], [handle])
    (segment,) = plan.facts
    assert (segment.handle, segment.asked) == (pair.strict.signer.mint(fact), handle)
    *_, last = pair.lax.generate(plan, Sampling(max_tokens=1))
    assert last.report is not None and last.report.facts_injected == 1
