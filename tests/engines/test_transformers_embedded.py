"""Numerical truths of injection, in float32, on the transformers engine: the oracle for the others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tiny_models
import torch

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.requests import DROPPED
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import EngineClosedError, EngineError
from inferscale_mem.types import EncodePlan, EncodeReport, InjectReport, PromptPlan, Sampling, Scope, Segment, Span

ALICE = Scope(user_id="alice")
STORE = "store"
TOLERANCE = 1e-4
FIRST_TOKEN = Sampling(max_tokens=1, temperature=0.0, logprobs=-1)

Open = Callable[..., TransformersEngine]


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Engines on tiny models, one of each kind."""
    engines: dict[object, TransformersEngine] = {}

    def open_one(family: str, record_dtype: str = "auto", **changes: object) -> TransformersEngine:
        key = (family, record_dtype, *sorted((name, str(value)) for name, value in changes.items()))
        if key not in engines:
            path = tiny_models.save(family, tmp_path_factory.mktemp(family), **changes)
            config = EngineConfig(kind="transformers", dtype="float32", record_bytes=8 << 20, record_dtype=record_dtype)
            engines[key] = TransformersEngine(path, config)
        return engines[key]

    yield open_one
    for engine in engines.values():
        engine.close()


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=count))


def ask(engine: TransformersEngine, plan: PromptPlan) -> tuple[torch.Tensor, InjectReport]:
    """First-token log-probs over the whole vocabulary, and the report."""
    (chunk,) = engine.generate(plan, FIRST_TOKEN)
    assert chunk.logprobs is not None
    assert chunk.report is not None
    return torch.tensor([chunk.logprobs[0][i] for i in range(tiny_models.VOCAB)]), chunk.report


def plain(engine: TransformersEngine, prompt: Sequence[int]) -> torch.Tensor:
    return ask(engine, PromptPlan((Segment("text", tuple(prompt)),)))[0]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


def fact(name: str, ids: tuple[int, ...]) -> Segment:
    return Segment("fact", ids, f"record.{name}", f"handle.{name}")


def encode(engine: TransformersEngine, context: Sequence[Segment], new: Segment) -> tuple[int, tuple[str, ...]]:
    """Encode one segment behind others; returns the tokens prefilled, and what it was based on."""
    start = sum(len(segment.token_ids) for segment in context)
    assert new.record is not None
    owner = ALICE if new.handle else None
    span = Span(new.record, start, start + len(new.token_ids), new.handle, owner)
    unread = Segment(new.kind, new.token_ids, None, new.handle)
    report = engine.encode(EncodePlan((*context, unread), (span,), ALICE, STORE))
    assert report.encoded == (new.record,)
    return report.tokens_prefilled, report.based_on


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_records_of_the_exact_prefix_answer_like_plain_prefill(open_engine: Open, family: str) -> None:
    engine = open_engine(family)
    for header_length in (1, 7, 8, 9, 18, 31):
        for fact_length in (1, 6, 8, 11, 20):
            header = Segment("header", tokens(header_length, 1), "header")
            memory = fact("a", tokens(fact_length, 2))
            rest = Segment("text", tokens(5, 3))
            prompt = (*header.token_ids, *memory.token_ids, *rest.token_ids)
            end = header_length + fact_length
            spans = (
                Span("header", 0, header_length),
                Span("record.a", header_length, end, "handle.a", ALICE),
            )
            report = engine.encode(EncodePlan((Segment("text", prompt[:end]),), spans, ALICE, STORE))
            assert report.encoded == ("header", "record.a")
            injected, told = ask(engine, PromptPlan((header, memory, rest), ALICE, STORE))
            assert (told.tokens_injected, told.tokens_prefilled, told.facts_injected) == (end, 5, 1)
            assert difference(injected, plain(engine, prompt)) < TOLERANCE


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_record_of_other_keys_would_show(open_engine: Open, family: str) -> None:
    """The differences above are small because the KV is right, not because answers hardly depend on it."""
    engine = open_engine(family)
    one, other = tokens(12, 4), tokens(12, 5)
    rest = tokens(3, 6)
    assert difference(plain(engine, (*one, *rest)), plain(engine, (*other, *rest))) > 0.1
    turned = tuple(reversed(one))
    assert difference(plain(engine, (*one, *rest)), plain(engine, (*turned, *rest))) > 0.01


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in tiny_models.FAMILIES),
        ("gemma3", {"layer_types": ["full_attention"]}),
        ("glm4", {"partial_rotary_factor": 0.5}),
        ("cohere", {}),
        ("smollm3", {"no_rope_layers": [0], "no_rope_layer_interval": 1}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
    ],
)
def test_facts_encoded_alone_can_be_moved(open_engine: Open, family: str, changes: dict[str, object]) -> None:
    """In a model of one layer a token's key and value depend on nothing else, so moved records must be exact."""
    engine = open_engine(family, num_hidden_layers=1, **changes)
    facts = [fact(str(i), tokens(length, 10 + i)) for i, length in enumerate((9, 3, 17, 8))]
    for memory in facts:
        encode(engine, (), memory)
    header = Segment("header", tokens(13, 20), "header")
    encode(engine, (), header)
    rest = Segment("text", tokens(4, 21))
    for order in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1)):
        segments = (header, *(facts[i] for i in order), rest)
        injected, told = ask(engine, PromptPlan(segments, ALICE, STORE))
        assert told.facts_injected == len(order)
        prompt = [token for segment in segments for token in segment.token_ids]
        assert difference(injected, plain(engine, prompt)) < TOLERANCE


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_records_in_8_bits_are_near(open_engine: Open, family: str) -> None:
    engine, exact = open_engine(family, "int8"), open_engine(family)
    assert engine.info.record_dtype == "int8" and engine.info.fingerprint != exact.info.fingerprint
    assert 3 * engine.info.bytes_per_token < exact.info.bytes_per_token, "float32 takes four bytes"
    memory, rest = fact("a", tokens(20, 2)), Segment("text", tokens(5, 3))
    encode(engine, (), memory)
    injected, told = ask(engine, PromptPlan((memory, rest), ALICE, STORE))
    assert (told.tokens_injected, told.facts_injected) == (20, 1)
    wanted = plain(engine, (*memory.token_ids, *rest.token_ids))
    assert TOLERANCE < difference(injected, wanted) < 0.1
    assert float((wanted.exp() * (wanted - injected)).sum()) < 1e-3


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_facts_encoded_on_all_before_them_answer_like_plain_prefill(open_engine: Open, family: str) -> None:
    engine = open_engine(family, num_hidden_layers=4)
    segments: list[Segment] = [Segment("header", tokens(11, 30), "header")]
    encode(engine, (), segments[0])
    for i in range(6):
        new = fact(str(i), tokens(5 + 3 * i, 40 + i))
        prefilled, based_on = encode(engine, segments, new)
        assert prefilled == len(new.token_ids)
        assert based_on == tuple(segment.record for segment in segments)
        segments.append(new)
    rest = Segment("text", tokens(7, 31))
    injected, told = ask(engine, PromptPlan((*segments, rest), ALICE, STORE))
    assert (told.facts_injected, told.tokens_prefilled) == (6, 7)
    prompt = [token for segment in (*segments, rest) for token in segment.token_ids]
    assert difference(injected, plain(engine, prompt)) < TOLERANCE


def test_long_prompts_are_computed_in_parts(tmp_path: Path) -> None:
    path = tiny_models.save("gemma3", tmp_path)
    whole = TransformersEngine(path, EngineConfig(kind="transformers", dtype="float32"))
    parts = TransformersEngine(path, EngineConfig(kind="transformers", dtype="float32", max_batched_tokens=7))
    prompt = tokens(60, 50)
    try:
        assert difference(plain(whole, prompt), plain(parts, prompt)) < TOLERANCE
        memory = fact("a", prompt[10:40])
        encode(parts, (Segment("text", prompt[:10]),), memory)
        encode(parts, (), Segment("header", prompt[:10], "header"))
        segments = (Segment("header", prompt[:10], "header"), memory, Segment("text", prompt[40:]))
        injected, told = ask(parts, PromptPlan(segments, ALICE, STORE))
        assert told.tokens_injected == 40
        assert difference(injected, plain(whole, prompt)) < TOLERANCE
    finally:
        whole.close()
        parts.close()


class Gate:
    """Lets an engine's model wait in its next forward step."""

    def __init__(self, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        forward = engine._model.forward

        def wait(*args: object) -> torch.Tensor:
            self.reached.set()
            self.opened.wait()
            return forward(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._model, "forward", wait)


def lone(name: str, ids: tuple[int, ...]) -> EncodePlan:
    """Encodes one fact at position 0."""
    segment = fact(name, ids)
    return EncodePlan(
        (Segment("fact", ids),), (Span(f"record.{name}", 0, len(ids), segment.handle, ALICE),), ALICE, STORE
    )


def test_pages_of_a_fact_dropped_while_it_is_encoded_may_be_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget holds one fact, so the second one gets the pages of the first, which is still being computed."""
    path = tiny_models.save("llama", tmp_path, num_hidden_layers=1)
    probe = TransformersEngine(path, EngineConfig(kind="transformers", dtype="float32"))
    budget = 16 * probe.info.bytes_per_token
    probe.close()
    engine = TransformersEngine(path, EngineConfig(kind="transformers", dtype="float32", record_bytes=budget))
    gate = Gate(engine, monkeypatch)
    first, second = tokens(16, 60), tokens(16, 61)
    reports: dict[str, EncodeReport] = {}

    def encode_one(name: str, ids: tuple[int, ...]) -> threading.Thread:
        thread = threading.Thread(target=lambda: reports.update({name: engine.encode(lone(name, ids))}))
        thread.start()
        return thread

    try:
        one = encode_one("first", first)
        gate.reached.wait()
        engine.drop(["handle.first"])
        other = encode_one("second", second)
        while engine.status().bytes != budget and other.is_alive():
            time.sleep(0.001)
        gate.opened.set()
        one.join()
        other.join()
        assert reports["first"].refused == {"record.first": DROPPED}
        assert reports["second"].encoded == ("record.second",)
        rest = Segment("text", tokens(4, 62))
        injected, told = ask(engine, PromptPlan((fact("second", second), rest), ALICE, STORE))
        assert told.facts_injected == 1
        assert difference(injected, plain(engine, (*second, *rest.token_ids))) < TOLERANCE
    finally:
        gate.opened.set()
        engine.close()


def test_closing_while_the_model_works_ends_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(
        tiny_models.save("llama", tmp_path), EngineConfig(kind="transformers", dtype="float32", max_batched_tokens=8)
    )
    gate = Gate(engine, monkeypatch)
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    long = tokens(40, 70)
    threads = [
        run(lambda: engine.encode(lone("a", long))),
        run(lambda: list(engine.generate(PromptPlan((Segment("text", long),)), Sampling(max_tokens=4)))),
    ]
    gate.reached.wait()
    closer = run(engine.close)
    while not engine._closed:
        time.sleep(0.001)
    gate.opened.set()
    for thread in (*threads, closer):
        thread.join()
    assert [type(error) for error in errors] == [EngineClosedError, EngineClosedError]


def test_what_fails_leaves_nothing_behind(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("llama")
    rest = Segment("text", tokens(4, 81))
    encode(engine, (), fact("kept", tokens(5, 80)))
    plan = PromptPlan((fact("kept", tokens(5, 80)), rest), ALICE, STORE)
    expected, before = ask(engine, plan)[0], engine.status()

    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine._model, "forward", fail)
        with pytest.raises(EngineError, match="out of memory"):
            engine.encode(lone("lost", tokens(9, 82)))
        with pytest.raises(EngineError, match="out of memory"):
            ask(engine, plan)
    assert (engine.status().records, engine.status().bytes) == (before.records, before.bytes)
    assert torch.equal(ask(engine, plan)[0], expected)
