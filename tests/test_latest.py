"""memory_position="latest": what the conversation costs, and that nothing of it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from family_templates import FAMILIES, family_tokenizer
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from recorder_helpers import ALICE, KEY, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.adapters.langchain.messages import to_template
from inferscale_mem.config import EncodingConfig
from inferscale_mem.handles import HandleSigner
from inferscale_mem.prompt import HEADING, PromptPlanner
from inferscale_mem.protocols import Engine
from inferscale_mem.service import MemoryService
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import PromptPlan, Sampling, Segment

TURNS = 20
FACTS = [f"Fact number {i} about Alice." for i in range(12)]


class Talk:
    """A conversation whose memories change with each turn."""

    def __init__(self, engine: Engine) -> None:
        signer = HandleSigner(KEY, "tests")
        index = SmallIndex(signer)
        self.service = MemoryService(engine, index, signer, EncodingConfig())
        facts = [new_fact(text, ALICE) for text in FACTS]
        index.put(*facts)
        self.service.add(facts)
        assert self.service.wait(120)
        self.handles = [self.service.handle(fact) for fact in facts]
        self.chat = ChatInferScale(service=self.service, temperature=0.0, max_tokens=24, memory_position="latest")
        self.messages: list[BaseMessage] = [SystemMessage("You are kind.")]

    def turn(self, number: int, **options: Any) -> AIMessage:
        self.messages.append(HumanMessage(f"Question number {number}, please answer it."))
        memories = [self.handles[(number * 5 + i) % len(FACTS)] for i in range(4)]
        answer = self.chat.invoke(self.messages, memories=memories, **options)
        self.messages.append(AIMessage(str(answer.content)))
        return answer

    def tokens(self, messages: list[BaseMessage]) -> int:
        return self.chat.get_num_tokens_from_messages(messages)


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    engine = FakeEngine(lambda plan, sampling: "An answer of some length.", key=KEY, max_model_len=1 << 16)
    yield engine
    engine.close()


def test_a_turn_costs_at_most_twice_its_own_tokens(fake: FakeEngine) -> None:
    """Its own: what the conversation grew by since the last request, an answer and a question."""
    talk = Talk(fake)
    before = 0
    for number in range(TURNS):
        answer = talk.turn(number)
        report = answer.response_metadata["inferscale"]
        own = talk.tokens(talk.messages[:-1]) - before
        before += own
        assert report["facts_injected"] == 4
        assert report["tokens_prefilled"] <= 2 * own, f"turn {number}"
        assert report["tokens_prefilled"] + report["tokens_injected"] == len(fake.requests[-1][0].token_ids)
        if number:
            encoded = fake.encodes[-1].spans
            assert sum(span.end - span.start for span in encoded) <= 2 * own, "only what is new is encoded"


def test_the_block_stands_before_the_latest_human_message(fake: FakeEngine) -> None:
    talk = Talk(fake)
    for number in range(3):
        talk.turn(number)
    prompt = fake.tokenizer.decode(fake.requests[-1][0].token_ids)
    before, behind = prompt.split(HEADING)
    assert before.index("Question number 0") < before.index("Question number 1") < before.rindex("An answer")
    assert behind.startswith("- Fact number") and behind.index("Fact number") < behind.index("Question number 2")
    assert prompt.count("Memories:") == 1 and "ism1" not in prompt


def test_without_memories_the_conversation_is_still_in_records(fake: FakeEngine) -> None:
    talk = Talk(fake)
    for number in range(3):
        talk.turn(number)
    talk.messages.append(HumanMessage("Bye."))
    report = talk.chat.invoke(talk.messages).response_metadata["inferscale"]
    assert report["tokens_prefilled"] < 150 < report["tokens_injected"]


def test_a_lost_part_is_made_again(fake: FakeEngine) -> None:
    talk = Talk(fake)
    for number in range(3):
        talk.turn(number)
    fake.evict_all()
    assert talk.turn(3).response_metadata["inferscale"]["facts_injected"] == 0
    assert talk.service.wait(20)
    assert talk.turn(3).response_metadata["inferscale"]["facts_injected"] == 4


async def test_both_ways_of_asking_make_the_same(fake: FakeEngine) -> None:
    talk = Talk(fake)
    talk.turn(0)
    talk.messages.append(HumanMessage("And now?"))
    answer = await talk.chat.ainvoke(talk.messages, memories=talk.handles[:2])
    assert answer.response_metadata["inferscale"]["facts_injected"] == 2


def test_conversations_with_different_pasts_share_no_parts(fake: FakeEngine) -> None:
    """A part's record is named after all that stands in front of it."""
    planner = PromptPlanner(fake.tokenizer, "f")

    def parts(first: str) -> list[Segment]:
        said = [("user", first), ("assistant", "Yes."), ("user", "Why?"), ("assistant", "So."), ("user", "Hm?")]
        messages = [{"role": role, "content": content} for role, content in said]
        plan = planner.plan(messages, {}, is_ready=bool, scope=None, store="", position="latest")
        return [segment for segment in plan.segments if segment.kind == "header"]

    one, other = parts("Is it A?"), parts("Is it B?")
    assert one[0] == other[0] and one[2].token_ids == other[2].token_ids
    assert not {s.record for s in one[1:]} & {s.record for s in other[1:]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_begins_as_the_one_before(family: str) -> None:
    """Whatever the template does, the next turn finds the parts of this one; the rest is what a plain prompt has."""
    tokenizer = family_tokenizer(family)
    planner = PromptPlanner(tokenizer, "f")
    said = [{"role": "system", "content": "Be kind."}]
    names: list[str] = []
    for number in range(4):
        said.append({"role": "user", "content": f"Question {number}?"})
        plan = planner.plan(said, {}, is_ready=bool, scope=None, store="", position="latest")
        parts = [str(segment.record) for segment in plan.segments if segment.kind == "header"]
        assert parts[: len(names)] == names and len(parts) == len(names) + 1
        names = parts
        plain = planner.plan(said, {}, is_ready=bool, scope=None, store="")
        spell = lambda p: tokenizer.decode(p.token_ids, skip_special_tokens=False)  # noqa: E731
        assert spell(plan) == spell(plain)
        said.append({"role": "assistant", "content": f"Answer {number}."})


@pytest.mark.engine
def test_on_vllm_injected_conversations_answer_as_plain_text(open_tiny: Callable[..., Engine]) -> None:
    """Facts are encoded alone here, so only their own loss may show: with none, log-probs are those of plain text."""
    engine = open_tiny("llama", {"record_bytes": 16 << 20, "max_model_len": 512})
    talk = Talk(engine)
    for number in range(3):
        talk.messages.append(HumanMessage(f"Question {number}?"))
        first = Sampling(max_tokens=1, temperature=0.0, logprobs=-1)
        plan = talk.service.plan(to_template(talk.messages), position="latest")
        injected = list(talk.service.generate(plan, first))
        plain = list(engine.generate(PromptPlan((Segment("text", tuple(plan.token_ids)),)), first))
        assert injected[-1].report is not None and plain[0].logprobs and injected[0].logprobs
        tables = injected[0].logprobs[0], plain[0].logprobs[0]
        assert max(abs(tables[0][token] - tables[1][token]) for token in tables[1]) < 1e-3
        if number == 2:
            assert injected[-1].report.tokens_injected > injected[-1].report.tokens_prefilled
        talk.messages.append(AIMessage("Well, yes."))
    talk.service.close()
