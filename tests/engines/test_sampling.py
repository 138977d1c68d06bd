from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.hf.sampling import Sampler, top_logprobs, truncate, with_defaults
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import InputError, MissingDependencyError
from inferscale_mem.types import PromptPlan, Sampling, Segment

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
"""Probabilities: 0.063, 0.462, 0.170, 0.023, 0.280."""


def kept(sampling: Sampling) -> list[int]:
    return truncate(LOGITS, sampling).isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 4]),
        (Sampling(top_k=0), [0, 1, 2, 3, 4]),
        (Sampling(top_k=-1), [0, 1, 2, 3, 4]),
        (Sampling(top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.46), [1]),
        (Sampling(top_p=0.47), [1, 4]),
        (Sampling(top_p=0.75), [1, 2, 4]),
        (Sampling(top_p=1e-6), [1]),
        (Sampling(top_p=1.0), [0, 1, 2, 3, 4]),
        (Sampling(min_p=0.3), [1, 2, 4]),
        (Sampling(min_p=1.0), [1]),
        (Sampling(top_k=3, top_p=0.8), [1, 4]),
    ],
)
def test_what_may_be_chosen(sampling: Sampling, expected: list[int]) -> None:
    assert kept(sampling) == expected


def test_penalties() -> None:
    def adjusted(answer: list[int], **settings: float) -> list[float]:
        sampler = Sampler(Sampling(**settings), prompt=[3], index=0, end_tokens=[4])  # type: ignore[arg-type]
        return sampler.adjust(LOGITS, answer).tolist()

    assert adjusted([1, 1, 2], presence_penalty=0.5) == pytest.approx([0.0, 1.5, 0.5, -1.0, 1.5])
    assert adjusted([1, 1, 2], frequency_penalty=0.5) == pytest.approx([0.0, 1.0, 0.5, -1.0, 1.5])
    assert adjusted([1, 1, 2], repetition_penalty=2.0) == pytest.approx([0.0, 1.0, 0.5, -2.0, 1.5])
    assert adjusted([], repetition_penalty=2.0) == pytest.approx([0.0, 2.0, 1.0, -2.0, 1.5])
    assert adjusted([1], min_tokens=2)[4] == -math.inf
    assert adjusted([1, 1], min_tokens=2)[4] == 1.5
    assert LOGITS.tolist() == [0.0, 2.0, 1.0, -1.0, 1.5]


def test_temperature() -> None:
    def shares(**settings: float) -> list[float]:
        sampler = Sampler(Sampling(seed=0, **settings), [], 0, [])  # type: ignore[arg-type]
        drawn = torch.tensor([sampler.choose(LOGITS) for _ in range(4000)])
        return (torch.bincount(drawn, minlength=5) / 4000).tolist()

    assert shares(temperature=0.0) == [0, 1, 0, 0, 0]
    assert shares(temperature=1.0) == pytest.approx(LOGITS.softmax(0).tolist(), abs=0.03)
    assert shares() == pytest.approx(LOGITS.softmax(0).tolist(), abs=0.03)
    assert shares(temperature=0.5) == pytest.approx((LOGITS / 0.5).softmax(0).tolist(), abs=0.03)
    assert shares(temperature=1.0, top_k=1) == [0, 1, 0, 0, 0]


def test_log_probabilities() -> None:
    scores = LOGITS.log_softmax(0).tolist()
    assert top_logprobs(LOGITS, 3, 2) == pytest.approx({1: scores[1], 4: scores[4], 3: scores[3]})
    assert top_logprobs(LOGITS, 1, 0) == pytest.approx({1: scores[1]})
    assert top_logprobs(LOGITS, 1, -1) == pytest.approx(dict(enumerate(scores)))


def test_generation_config_fills_what_is_left_open() -> None:
    filled = with_defaults(Sampling(top_k=5), {"temperature": 0.2, "top_k": 50, "max_new_tokens": 7})
    assert filled == Sampling(top_k=5, temperature=0.2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    path = tiny_models.save("gemma3", tmp_path_factory.mktemp("gemma3"))
    engine = TransformersEngine(path, EngineConfig(kind="transformers", dtype="float32"))
    yield engine
    engine.close()


def ask(engine: TransformersEngine, sampling: Sampling) -> list[tuple[str, list[int], str]]:
    """Text, tokens and finish reason of every answer."""
    tokens = engine.tokenizer.encode("What a long and winding prompt this is, ", literal=True)
    plan = PromptPlan((Segment("text", tuple(tokens)),))
    texts = [""] * sampling.n
    ids: list[list[int]] = [[] for _ in texts]
    reasons = [""] * sampling.n
    for chunk in engine.generate(plan, sampling):
        texts[chunk.index] += chunk.text
        ids[chunk.index] += chunk.token_ids
        reasons[chunk.index] = chunk.finish_reason or reasons[chunk.index]
    return list(zip(texts, ids, reasons, strict=True))


def test_answers_of_one_request_equal_requests_of_their_own(engine: TransformersEngine) -> None:
    """Also when some of them have ended and the batch has shrunk; more tokens than the sliding window."""
    sampling = Sampling(max_tokens=30, temperature=1.2, seed=11)
    alone = [ask(engine, replace(sampling, seed=11 + i))[0] for i in range(3)]
    assert len({text for text, _, _ in alone}) == 3
    assert ask(engine, replace(sampling, n=3)) == alone
    stop = (alone[1][0][4:6],)
    stopped = [ask(engine, replace(sampling, seed=11 + i, stop=stop))[0] for i in range(3)]
    assert len({len(ids) for _, ids, _ in stopped}) > 1
    assert ask(engine, replace(sampling, n=3, stop=stop)) == stopped


def test_greedy_does_not_depend_on_the_seed(engine: TransformersEngine) -> None:
    greedy = Sampling(max_tokens=10, temperature=0.0)
    assert ask(engine, greedy) == ask(engine, replace(greedy, seed=5))


def test_schema_in_every_answer(engine: TransformersEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    answers = ask(engine, Sampling(max_tokens=60, n=4, seed=0, temperature=2.0, json_schema=schema))
    for text, _, reason in answers:
        assert reason == "stop"
        found = json.loads(text)
        assert found.keys() == {"n", "ok"}
        assert 0 <= found["n"] <= 9
        assert found["ok"] in (True, False)


def test_what_contradicts_itself_is_refused(engine: TransformersEngine) -> None:
    for sampling in (
        Sampling(max_tokens=4, min_tokens=5),
        Sampling(max_tokens=9, min_tokens=5, json_schema={"type": "object"}),
        Sampling(max_tokens=4, n=2, temperature=0.0),
        Sampling(max_tokens=4, prompt_logprobs=1),
    ):
        with pytest.raises(InputError):
            ask(engine, sampling)


OUT_OF_RANGE: list[dict[str, Any]] = [
    *({"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"n": 0}, {"stop": ("",)}, {"presence_penalty": 3.0}),
    *({"top_k": -2}, {"repetition_penalty": 0.0}, {"min_p": 1.1}, {"min_tokens": -1}, {"logprobs": -2}),
]


@pytest.mark.parametrize("wrong", OUT_OF_RANGE)
def test_what_is_out_of_range_is_never_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_missing_grammar_library_is_named(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingDependencyError, match="xgrammar"):
        ask(engine, Sampling(max_tokens=4, json_schema={"type": "object"}))
    assert ask(engine, Sampling(max_tokens=4, temperature=0.0))
