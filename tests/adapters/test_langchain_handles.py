"""No handle reaches the model or the user: a property over message shapes, places and chat templates (DESIGN 9)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from family_templates import FAMILIES, family_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from recorder_helpers import ALICE, BOB, KEY, new_fact
from small_index import SmallIndex

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.config import EncodingConfig
from inferscale_mem.errors import InputError
from inferscale_mem.handles import HandleSigner, find
from inferscale_mem.service import MemoryService
from inferscale_mem.testing import FakeEngine, fake_engine
from inferscale_mem.types import PromptPlan

FORGED = "ism1.0000000000000000.0000000000000000"


class FamilyEngine(FakeEngine):
    """A fake engine that has a family's chat template, and repeats the end of its prompt."""

    def __init__(self, family: str) -> None:
        self._family = family_tokenizer(family)
        super().__init__(self._echo, key=KEY, max_model_len=1 << 16)

    def _echo(self, plan: PromptPlan, sampling: Any) -> str:
        return self._family.decode(plan.token_ids[-400:])

    @property
    def tokenizer(self) -> Any:
        return self._family


class House:
    """A memory of two owners; strict ones hand out handles that expire."""

    def __init__(self, family: str, strict: bool) -> None:
        self.engine = FamilyEngine(family)
        signer = HandleSigner(KEY, "tests", 60 if strict else None, lambda: self.now)
        self.now = 1_800_000_000.0
        index = SmallIndex(signer)
        self.service = MemoryService(self.engine, index, signer, EncodingConfig())
        alices = [new_fact(text, ALICE) for text in ("Allergic to peanuts.", "Likes tea.", "Works in Oslo.")]
        bobs = [new_fact("Has a secret.", BOB)]
        index.put(*alices, *bobs)
        self.expired = self.service.handle(alices[2])  # by now, if it expires
        self.now += 100
        self.alices = [self.service.handle(fact) for fact in alices]
        self.now += 10
        self.alices += [self.service.handle(alices[0])]  # if it expires: another one of the same fact
        self.bobs = [self.service.handle(fact) for fact in bobs]
        self.chat = ChatInferScale(service=self.service)

    @property
    def prompt(self) -> str:
        return str(self.engine.tokenizer.decode(self.engine.requests[-1][0].token_ids, skip_special_tokens=False))


@pytest.fixture(autouse=True)
def _room_for_the_families_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "VOCAB_SIZE", 1000)


@lru_cache
def house_of(family: str, strict: bool = False) -> House:
    return House(family, strict)


FRAMES = (
    "{}",
    "- {}\n- {}",
    "Known: {}, {}.",
    '[{{"memory": "{}"}}, {{"memory": "{}"}}]',
    "<m>{}</m><m>{}</m>",
    "`{}` (a {})",
)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[tuple[str, str, bool]], list[int]]:
    """Messages as (kind, text with places for handles, as blocks), and which handles go there."""
    kinds = draw(st.lists(st.sampled_from(["system", "human", "ai", "tool", "reasoning"]), max_size=5))
    said = [(kind, draw(st.sampled_from(FRAMES)), draw(st.booleans())) for kind in [*kinds, "human"]]
    return said, draw(st.lists(st.integers(0, 3), min_size=24, max_size=24))


def build(said: list[tuple[str, str, bool]], handles: list[str]) -> list[BaseMessage]:
    messages: list[BaseMessage] = []
    left = iter(handles)
    for kind, frame, blocks in said:
        text = frame.format(next(left), next(left))
        content: Any = [{"type": "text", "text": text}, {"type": "text", "text": "More."}] if blocks else text
        if kind == "system":
            messages.append(SystemMessage(content))
        elif kind == "ai":
            messages.append(AIMessage(content))
        elif kind == "reasoning":
            messages.append(AIMessage("So.", additional_kwargs={"reasoning_content": text}))
        elif kind == "tool":
            call = {"name": "look", "args": {"what": text, "deep": [{"er": text}]}, "id": "call00001"}
            messages += [
                HumanMessage("Look."),
                AIMessage("", tool_calls=[call]),
                ToolMessage(text, tool_call_id="call00001"),
            ]
            messages.append(AIMessage("Done."))
        else:
            messages.append(HumanMessage(content))
    return messages


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(),
    position=st.sampled_from(["system", "latest"]),
    asked=st.booleans(),
    scoped=st.booleans(),
    strict=st.booleans(),
)
def test_no_handle_reaches_the_model_or_the_user(
    family: str,
    shape: tuple[list[tuple[str, str, bool]], list[int]],
    position: Any,
    asked: bool,
    scoped: bool,
    strict: bool,
) -> None:
    house = house_of(family, strict)
    said, chosen = shape
    messages = build(said, [house.alices[i] for i in chosen])
    options: dict[str, Any] = {"memory_position": position}
    if asked:
        options["memories"] = house.alices[:2]
    if scoped:
        options["user_id"] = "alice"
    chunks = list(house.chat.stream(messages, **options))
    told = "".join(str(chunk.content) + str(chunk.additional_kwargs) for chunk in chunks)
    assert "ism1" not in house.prompt and "ism1" not in told
    report = chunks[-1].response_metadata["inferscale"]
    assert house.prompt.count("Allergic") <= 1
    served = "Allergic" in house.prompt or "Likes tea" in house.prompt or "Oslo" in house.prompt
    assert served == (asked or any(kind == "system" for kind, _, _ in said)), "and only who may ask is served"
    missed = {miss["handle"] for miss in report["missed"]}
    written = " ".join(str(message.model_dump()) for message in messages)
    assert {found.handle for found in find(written)} - missed <= set(house.alices), "whatever is not served is counted"
    assert report["facts_requested"] == report["facts_injected"] + len(missed)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(),
    position=st.sampled_from(["system", "latest"]),
    kind=st.sampled_from(["forged", "foreign", "expired"]),
)
def test_forged_foreign_and_expired_handles_stay_inert_text(
    family: str, shape: tuple[list[tuple[str, str, bool]], list[int]], position: Any, kind: str
) -> None:
    house = house_of(family, kind == "expired")
    said, chosen = shape
    bad = {"forged": FORGED, "foreign": house.bobs[0], "expired": house.expired}[kind]
    messages = build(said, [bad for _ in chosen])
    answer = house.chat.invoke(messages, memory_position=position, user_id="alice", memories=house.alices[:1])
    report = answer.response_metadata["inferscale"]
    assert "secret" not in house.prompt and "Oslo" not in house.prompt and bad in house.prompt
    assert bad in {miss["handle"] for miss in report["missed"]}
    assert "Allergic to peanuts." in house.prompt


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("asked", [True, False])
def test_handles_in_tools_are_cut_out_or_inert_and_counted(family: str, asked: bool) -> None:
    house = house_of(family)
    mine, other, foreign = house.alices[0], house.alices[1], house.bobs[0]
    place = {"type": "string", "description": f"As {mine} or {foreign}"}
    schema = {"type": "object", "properties": {"id": place, "type": place}}
    tool = {"name": "look", "description": f"Looks for {other} and {FORGED}.", "parameters": schema}
    chat = house.chat.bind_tools([{"type": "function", "function": tool}])
    answer = chat.invoke([HumanMessage("Hi.")], user_id="alice", memories=[mine] if asked else [])
    assert "look" in house.prompt and mine not in house.prompt and other not in house.prompt
    assert foreign in house.prompt and FORGED in house.prompt and "Likes tea" not in house.prompt
    assert ("Allergic" in house.prompt) == asked
    missed = {miss["handle"]: miss["reason"] for miss in answer.response_metadata["inferscale"]["missed"]}
    assert {other, foreign, FORGED} | (set() if asked else {mine}) <= set(missed)
    assert "a tool's definition" in missed[other]


def test_an_id_in_a_calls_arguments_is_no_place_for_a_handle() -> None:
    house = house_of("qwen")
    call = {"name": "look", "args": {"id": house.alices[1], "type": [house.alices[2]]}, "id": "call00001"}
    told = [HumanMessage("Look."), AIMessage("", tool_calls=[call]), ToolMessage("No.", tool_call_id="call00001")]
    report = house.chat.invoke([*told, HumanMessage("Well?")], user_id="alice").response_metadata["inferscale"]
    assert "ism1" not in house.prompt
    assert {miss["handle"] for miss in report["missed"]} == set(house.alices[1:3])


@pytest.mark.parametrize("family", FAMILIES)
def test_human_handles_ask_only_where_the_app_says_so_and_names_a_scope(family: str) -> None:
    house = house_of(family)
    question = [HumanMessage(f"What about {house.alices[0]} and {house.bobs[0]}?")]
    house.chat.invoke(question, user_id="alice")
    assert "Allergic" not in house.prompt
    house.chat.invoke(question, user_id="alice", human_handles=True)
    assert "Allergic to peanuts." in house.prompt and house.alices[0] not in house.prompt
    assert "secret" not in house.prompt and house.bobs[0] in house.prompt
    with pytest.raises(InputError, match="scope"):
        house.chat.invoke(question, human_handles=True)


def test_placing_options_are_checked() -> None:
    house = house_of("qwen")
    for wrong in ({"memory_position": "first"}, {"human_handles": "yes"}):
        with pytest.raises(InputError):
            house.chat.invoke("Hi", **wrong)
