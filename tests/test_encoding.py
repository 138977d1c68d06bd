from __future__ import annotations

import itertools

import pytest
from small_index import SmallIndex
from template_tokenizer import QWEN, TemplateTokenizer

from inferscale_mem.encoding import MAX_CONTEXT, Policy, encode_plan, parse_policy
from inferscale_mem.errors import ConfigError, FactError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.types import EncodePlan, Fact, Scope

ALICE = Scope(user_id="alice")
SIGNER = HandleSigner(bytes(32), "memories")
TEXTS = ("drinks green tea", "has two cats", "drinks tea with milk", "is from Rome", "drinks milk")
FACTS = [Fact(f"id-{n}", text, ALICE, "1") for n, text in enumerate(TEXTS)]
TURNS = ["user: hello", "assistant: hi there", "user: I drink milk"]


class IndexWithTurns(SmallIndex):
    def turns(self, fact: Fact, w: int) -> list[str]:
        return TURNS[-w:]


@pytest.fixture
def planner() -> PromptPlanner:
    return PromptPlanner(TemplateTokenizer(QWEN), "fingerprint")


@pytest.fixture
def index() -> SmallIndex:
    index = IndexWithTurns(SIGNER)
    index.put(*FACTS, Fact("id-bob", "drinks milk too", Scope(user_id="bob"), "1"))
    return index


def lines(plan: EncodePlan) -> list[str]:
    return [TemplateTokenizer(QWEN).spell(segment.token_ids) for segment in plan.segments]


def encode(policy: str, index: SmallIndex, planner: PromptPlanner, **limits: int) -> EncodePlan:
    fact = FACTS[-1]
    return encode_plan(parse_policy(policy), fact, SIGNER.mint(fact), index, planner, SIGNER.mint, **limits)


# Policies.


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("alone", Policy("alone")),
        (" Header ", Policy("header")),
        ("header()", Policy("header")),
        ("dialog_window(4)", Policy("dialog_window", 4)),
        ("fact_window( 3 )", Policy("fact_window", 3)),
        ("fact_chain(8, nearest)", Policy("fact_chain", 8, "nearest")),
        ("FACT_CHAIN (8,previous) ", Policy("fact_chain", 8, "previous")),
        ("fact_chain(8)", Policy("fact_chain", 8, "nearest")),
        (f"fact_chain({MAX_CONTEXT})", Policy("fact_chain", MAX_CONTEXT)),
    ],
)
def test_policies(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(policy.name) == policy


def test_names_are_canonical() -> None:
    names = ["alone", "header", "dialog_window(4)", "fact_window(3)", "fact_chain(8, nearest)"]
    assert [parse_policy(name).name for name in names] == names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "known are alone"),
        ("fact_chian(8)", "known are alone"),
        ("fact_chain(8", "known are alone"),
        ("fact_chain(8) extra", "known are alone"),
        ("header(3)", "write header"),
        ("fact_chain", "fact_chain(8, nearest)"),
        ("fact_chain()", "from 1 to"),
        ("fact_chain(0)", "write header"),
        ("fact_chain(-1)", "from 1 to"),
        ("fact_chain(2.5)", "from 1 to"),
        ("fact_chain(٣)", "from 1 to"),
        (f"fact_chain({MAX_CONTEXT + 1})", "from 1 to"),
        ("fact_chain(8, farthest)", "nearest or previous"),
        ("fact_chain(8, nearest, 3)", "from 1 to"),
        ("fact_window(8, nearest)", "from 1 to"),
        ("dialog_window(x)", "from 1 to"),
    ],
)
def test_nonsense(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text)
    assert told in str(caught.value) and repr(text) in str(caught.value)


def test_a_policy_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="known are"):
        parse_policy(8)  # type: ignore[arg-type]


# Plans.


def test_alone(index: SmallIndex, planner: PromptPlanner) -> None:
    plan = encode("alone", index, planner)
    assert lines(plan) == ["- drinks milk\n"]
    assert (plan.spans[0].start, plan.spans[0].end) == (0, len(plan.token_ids))


def test_header(index: SmallIndex, planner: PromptPlanner) -> None:
    plan = encode("header", index, planner)
    assert plan.segments[0] == planner.default_header()
    assert lines(plan)[1:] == ["- drinks milk\n"]


def test_fact_chain_is_injected_most_similar_last(index: SmallIndex, planner: PromptPlanner) -> None:
    plan = encode("fact_chain(3, nearest)", index, planner)
    assert lines(plan)[1:] == [
        "- has two cats\n",
        "- drinks green tea\n",
        "- drinks tea with milk\n",
        "- drinks milk\n",
    ]
    context = plan.segments[1:-1]
    assert [segment.record for segment in context] == [planner.record_id(SIGNER.mint(FACTS[n])) for n in (1, 0, 2)]
    assert [segment.handle for segment in context] == [SIGNER.mint(FACTS[n]) for n in (1, 0, 2)]
    assert all(segment.kind == "fact" for segment in context)


def test_previous_facts_stand_in_their_order(index: SmallIndex, planner: PromptPlanner) -> None:
    plan = encode("fact_chain(2, previous)", index, planner)
    assert lines(plan)[1:] == ["- drinks tea with milk\n", "- is from Rome\n", "- drinks milk\n"]


def test_fact_window_is_the_same_text_without_records(index: SmallIndex, planner: PromptPlanner) -> None:
    window, chain = encode("fact_window(3)", index, planner), encode("fact_chain(3)", index, planner)
    assert window.token_ids == chain.token_ids
    assert [segment.record for segment in window.segments[1:-1]] == [None] * 3
    assert window.segments[0].record == chain.segments[0].record is not None


def test_dialog_window_is_list_items(index: SmallIndex, planner: PromptPlanner) -> None:
    plan = encode("dialog_window(2)", index, planner)
    assert lines(plan)[1:] == ["- assistant: hi there\n", "- user: I drink milk\n", "- drinks milk\n"]
    assert [segment.kind for segment in plan.segments] == ["header", "text", "text", "fact"]
    assert [segment.record for segment in plan.segments[1:3]] == [None, None]


@pytest.mark.parametrize("policy", ["alone", "header", "dialog_window(2)", "fact_window(3)", "fact_chain(3)"])
def test_the_span_is_the_fact_as_it_is_served(policy: str, index: SmallIndex, planner: PromptPlanner) -> None:
    plan = encode(policy, index, planner)
    (span,) = plan.spans
    handle = SIGNER.mint(FACTS[-1])
    assert tuple(plan.token_ids[span.start : span.end]) == planner.fact_tokens(FACTS[-1].text)
    assert (span.record, span.handle, span.scope) == (planner.record_id(handle), handle, ALICE)
    assert (plan.scope, plan.store) == (ALICE, "memories")
    assert plan.segments[-1].handle == handle
    # What is served later under the same id has the same tokens, or it would never be injected.
    served = planner.plan(
        [{"role": "user", "content": "hi"}], {handle: FACTS[-1]}, is_ready=lambda _: True, scope=ALICE, store="memories"
    )
    assert served.facts[0].record == span.record
    assert served.facts[0].token_ids == plan.segments[-1].token_ids
    if policy != "alone":
        assert served.segments[0] == plan.segments[0]


def test_a_first_fact_has_the_header_only(planner: PromptPlanner) -> None:
    index = SmallIndex(SIGNER)
    index.put(FACTS[-1])
    assert len(encode("fact_chain(8)", index, planner).segments) == 2
    assert len(encode("dialog_window(8)", index, planner).segments) == 2


def test_context_that_does_not_fit_is_left_out(index: SmallIndex, planner: PromptPlanner) -> None:
    """The least similar goes first; what is similar but too long makes room for the next."""
    whole = encode("fact_chain(4)", index, planner)
    lengths = [len(segment.token_ids) for segment in whole.segments]
    assert encode("fact_chain(4)", index, planner, max_tokens=sum(lengths)).segments == whole.segments
    for drop in range(1, 5):
        limit = lengths[0] + sum(lengths[1 + drop :])
        plan = encode("fact_chain(4)", index, planner, max_tokens=limit)
        assert len(plan.token_ids) <= limit
        assert plan.segments == (whole.segments[0], *whole.segments[1 + drop :])
    short = lengths[0] + len(planner.fact_tokens("has two cats")) + lengths[-1]
    plan = encode("fact_chain(3)", index, planner, max_tokens=short)
    assert lines(plan)[1:] == ["- has two cats\n", "- drinks milk\n"]


def test_a_fact_that_does_not_fit(index: SmallIndex, planner: PromptPlanner) -> None:
    fitting = len(encode("header", index, planner).token_ids)
    encode("fact_chain(3)", index, planner, max_tokens=fitting)
    with pytest.raises(FactError, match=f"1 more than the {fitting - 1} "):
        encode("fact_chain(3)", index, planner, max_tokens=fitting - 1)
    encode("alone", index, planner, max_tokens=fitting - 1)


def test_context_without_a_record_goes_behind(index: SmallIndex, planner: PromptPlanner) -> None:
    fact = FACTS[-1]
    ready = {planner.record_id(SIGNER.mint(FACTS[n])) for n in (0, 2)}
    plan = encode_plan(
        parse_policy("fact_chain(3)"), fact, SIGNER.mint(fact), index, planner, SIGNER.mint, is_ready=ready.__contains__
    )
    assert lines(plan)[1:-1] == ["- drinks green tea\n", "- drinks tea with milk\n", "- has two cats\n"]


def test_contexts_differ_only_where_policies_do(index: SmallIndex, planner: PromptPlanner) -> None:
    names = ["alone", "header", "dialog_window(2)", "fact_window(2)", "fact_chain(2)", "fact_chain(2, previous)"]
    plans = [encode(name, index, planner).segments for name in names]
    assert all(one != other for one, other in itertools.combinations(plans, 2))
