"""Cases K1 to K7 and the engine's modes, on tiny models in float32, where every wrong number shows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from exact import OWNER, encode, first_token, material, plain

from inferscale_mem import wire
from inferscale_mem.config import EngineConfig
from inferscale_mem.protocols import Engine
from inferscale_mem.types import Chunk, PromptPlan, Sampling, Scope, Segment

pytestmark = pytest.mark.engine

EXACT = 1e-3
names = itertools.count()


def segment(kind: Any, length: int, seed: int, record: bool = True) -> Segment:
    return Segment(kind, material(250, length, seed), f"case{next(names)}" if record else None)


def text(length: int, seed: int) -> Segment:
    return segment("text", length, seed, record=False)


def greedy(engine: Engine, segments: list[Segment], max_tokens: int) -> tuple[int, ...]:
    """The answer; everything that has a record must have come from it."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    chunks = list(engine.generate(PromptPlan(tuple(segments), OWNER), sampling))
    (report,) = (chunk.report for chunk in chunks if chunk.report is not None)
    assert report.tokens_injected == sum(len(s.token_ids) for s in segments if s.record is not None)
    return tokens_of(chunks)


def tokens_of(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


@pytest.fixture(scope="module")
def engine(open_tiny: Callable[..., Engine]) -> Engine:
    return open_tiny("llama", {"max_batched_tokens": 128})


@pytest.fixture(scope="module")
def oracle(engine: Engine) -> Iterator[Engine]:
    """Another engine altogether, which nothing that happens in the first can reach: plain transformers."""
    from inferscale_mem.engines.transformers_embedded import TransformersEngine

    oracle = TransformersEngine(engine.info.model, EngineConfig(kind="transformers", dtype="float32"))
    yield oracle
    oracle.close()


def test_what_is_dropped_while_it_is_encoded_stops_nothing(engine: Engine) -> None:
    """Its encode takes several steps (128 tokens each), and the engine is busy with an answer meanwhile."""
    with ThreadPoolExecutor(8) as pool:
        answer = pool.submit(greedy, engine, [text(20, 0)], 200)
        for turn in range(30):
            long = segment("fact", 400, turn)
            made = pool.submit(encode, engine, [], long)
            drops = [pool.submit(engine.drop, [str(long.record)]) for _ in range(1 + turn % 3)]
            for done in (made, *drops):
                done.exception()  # a record that was dropped is refused
        assert len(answer.result()) == 200
    kept = segment("fact", 40, 99)
    encode(engine, [], kept)
    prompt = [kept, text(5, 98)]
    got = first_token(engine, prompt)
    assert got.report.tokens_injected == 40
    assert got.max_difference(first_token(engine, plain(prompt))) < EXACT


def test_k1_many_users_never_see_each_other(engine: Engine, oracle: Engine) -> None:
    header = segment("header", 21, 0)
    encode(engine, [], header)
    prompts = []
    for user in range(20):
        facts = [segment("fact", 6 + (user + n) % 9, 1000 * user + n) for n in range(20)]
        encode(engine, [header], *facts)
        prompts.append([header, *facts, text(4, user)])
    wanted = [first_token(oracle, plain(prompt)) for prompt in prompts]
    order = random.Random(0).sample(range(20), 20)
    with ThreadPoolExecutor(20) as pool:
        together = dict(zip(order, pool.map(lambda user: first_token(engine, prompts[user]), order), strict=True))
    for user in order:
        for got in (first_token(engine, prompts[user]), together[user]):
            assert got.report.facts_requested == 20
            assert got.report.tokens_injected == len(PromptPlan(tuple(prompts[user])).token_ids) - 4
            assert got.max_difference(wanted[user]) < EXACT


def test_k1_a_foreign_scope_gets_nothing(engine: Engine, oracle: Engine) -> None:
    header, fact = segment("header", 9, 1), segment("fact", 12, 2)
    encode(engine, [], header)
    mine = Segment("fact", fact.token_ids, fact.record, "a-handle")
    from inferscale_mem.types import EncodePlan, Span

    span = Span(str(fact.record), 9, 21, "a-handle", OWNER)
    assert engine.encode(EncodePlan((header, mine), (span,), OWNER, "store")).encoded
    prompt = [header, mine, text(3, 3)]
    assert first_token(engine, prompt, OWNER, "store").report.facts_injected == 1
    for scope, store in ((Scope(user_id="mallory"), "store"), (OWNER, "other store"), (None, "store")):
        got = first_token(engine, prompt, scope, store)
        assert got.report.facts_injected == 0
        assert got.report.missed[0].handle == "a-handle"
        assert got.max_difference(first_token(oracle, plain(prompt))) < EXACT


def test_k2_greedy_answers_with_a_cold_and_a_warm_prefix_cache(engine: Engine) -> None:
    for i in range(32):
        header, fact = segment("header", 40 + i, i), segment("fact", 5 + 7 * i % 32, 50 + i)
        prompt = [header, fact, text(1 + i % 3, 90 + i)]
        encode(engine, [], header, fact)
        cold = greedy(engine, prompt, 5)
        warm = greedy(engine, prompt, 5)
        assert cold == warm == greedy(engine, plain(prompt), 5)


def test_k3_plain_text_after_injection_is_plain(engine: Engine, oracle: Engine) -> None:
    header, facts = segment("header", 40, 5), [segment("fact", 30, n) for n in range(4)]
    encode(engine, [], header)
    for fact in facts:
        encode(engine, [], fact)  # alone, so that what is injected differs from plain prefill
    prompt = [header, *facts, text(5, 6)]
    wanted = first_token(oracle, plain(prompt))
    injected = first_token(engine, prompt)
    assert injected.report.tokens_injected == 160
    assert injected.max_difference(wanted) > 100 * EXACT
    assert first_token(engine, plain(prompt)).max_difference(wanted) < EXACT
    assert first_token(engine, prompt).max_difference(injected) < EXACT


def test_k5_two_requests_that_each_need_most_of_the_cache(open_tiny: Callable[..., Engine]) -> None:
    small = open_tiny("llama", {"kv_cache_bytes": 12 * 32 * 1024, "max_model_len": 320, "max_batched_tokens": 64})
    header, fact = segment("header", 100, 7), segment("fact", 100, 8)
    encode(small, [], header, fact)
    prompts = [[header, fact, text(40, n)] for n in range(2)]
    wanted = [greedy(small, plain(prompt), 60) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda prompt: greedy(small, prompt, 60), prompts))
    assert got == wanted


def test_k6_an_encode_that_is_preempted(open_tiny: Callable[..., Engine]) -> None:
    """Encodes that need all blocks that are free, beside answers that need one more now and then."""
    small: Any = open_tiny("llama", {"kv_cache_bytes": 12 * 32 * 1024, "max_model_len": 320, "max_batched_tokens": 32})
    scheduler = small._backend._engine.engine_core.engine_core.scheduler
    preempted = watch_preemptions(scheduler)
    facts: list[Segment] = []
    answers = []
    with ThreadPoolExecutor(1) as pool:
        while "encode" not in preempted and len(answers) < 20:
            answers.append(pool.submit(greedy, small, [text(40, len(answers))], 250))
            while not answers[-1].done() and "encode" not in preempted:
                free = min(scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), 310 // small.info.block_size)
                if free > 1:
                    facts.append(segment("fact", free * small.info.block_size - 2, len(facts)))
                    encode(small, [], facts[-1])
    assert "encode" in preempted, "no encode was preempted: the test does not test what it says"
    for number, answer in enumerate(answers):
        assert answer.result() == greedy(small, [text(40, number)], 250)
    for fact in facts[-3:]:
        prompt = [fact, text(3, 60)]
        got = first_token(small, prompt)
        assert got.report.tokens_injected == len(fact.token_ids)
        assert got.max_difference(first_token(small, plain(prompt))) < EXACT


def watch_preemptions(scheduler: Any) -> list[str]:
    """What the requests that are preempted from now on are for."""
    real, seen = scheduler._preempt_request, []

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        order = (request.kv_transfer_params or {}).get(wire.KEY)
        seen.append("answer" if order is None else order["op"])
        return real(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return seen


@pytest.mark.parametrize(
    "config",
    [{"prefix_caching": False}, {"enforce_eager": False}, {"max_batched_tokens": 32}],
    ids=["no_prefix_cache", "compiled", "chunked"],
)
def test_modes_of_the_engine(open_tiny: Callable[..., Engine], config: dict[str, Any]) -> None:
    engine = open_tiny("llama", config)
    header, facts = segment("header", 45, 0), [segment("fact", 20 + n, n) for n in range(1, 4)]
    encode(engine, [], header)
    for n, fact in enumerate(facts):
        encode(engine, [header, *facts[:n]], fact)
    for prompt in ([header, *facts, text(9, 4)], [header, *facts, text(60, 5)]):
        got = first_token(engine, prompt)
        assert got.report.tokens_injected == 45 + 21 + 22 + 23
        assert got.max_difference(first_token(engine, plain(prompt))) < EXACT
