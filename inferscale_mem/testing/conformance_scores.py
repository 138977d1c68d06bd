"""What every ``protocols.Scorer`` promises, as tests: subclass beside ``EngineConformance``, with the same fixtures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inferscale_mem.errors import InputError, PromptTooLongError
from inferscale_mem.protocols import Scorer
from inferscale_mem.testing.scene import FIRST_TOKEN, Scene, Segment, plain, raises
from inferscale_mem.types import PromptPlan

ANSWER = "tea, and rain"


class ScorerConformance:
    """Probabilities of given answers.

    Attributes:
        exact_tolerance: largest difference of log-probs between plain prefill and records of the exact prefix.
        same_tolerance: largest difference of log-probs between ``score`` and ``generate``.
    """

    exact_tolerance: float
    same_tolerance = 1e-4

    def test_scores_are_what_generate_says_token_by_token(self, engine: Any) -> None:
        scene = Scene(engine)
        plan, answer = scene.plan([]), scene.text(ANSWER).token_ids
        scores, report = _score(engine, plan, answer)
        assert len(scores) == len(answer)
        assert (report.tokens_injected, report.tokens_prefilled) == (0, len(plan.token_ids))
        for i, row in enumerate(scores):
            longer = PromptPlan((Segment("text", (*plan.token_ids, *answer[:i])),))
            expected = scene.ask(longer, FIRST_TOKEN).logprobs
            assert abs(sum(map(math.exp, row)) - 1) < 1e-3
            assert max(abs(row[token] - value) for token, value in expected.items()) < self.same_tolerance

    def test_scores_with_records_of_the_exact_prefix_are_those_of_plain_prefill(self, engine: Any) -> None:
        scene = Scene(engine)
        memories = scene.memories(3)
        scene.encode_all(memories)
        plan, answer = scene.plan(memories), scene.text(ANSWER).token_ids
        injected, report = _score(engine, plan, answer)
        expected, _ = _score(engine, plain(plan), answer)
        assert (report.facts_requested, report.facts_injected, report.missed) == (3, 3, ())
        assert report.tokens_prefilled == len(scene.suffix.token_ids)
        assert _apart(injected, expected) < self.exact_tolerance

    def test_scores_show_what_records_were_encoded_behind(self, engine: Any) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        assert scene.encode_header().encoded
        assert all(scene.encode([memory], header=False).encoded for memory in memories)
        plan, answer = scene.plan(memories), scene.text(ANSWER).token_ids
        injected, report = _score(engine, plan, answer)
        assert report.facts_injected == 2
        assert _apart(injected, _score(engine, plain(plan), answer)[0]) > 10 * self.exact_tolerance

    def test_one_token_is_an_answer(self, engine: Any) -> None:
        scene = Scene(engine)
        plan, answer = scene.plan([]), scene.text(ANSWER).token_ids
        whole = _score(engine, plan, answer)[0]
        assert _apart(_score(engine, plan, answer[:1])[0], whole[:1]) < self.same_tolerance

    def test_answers_that_cannot_be_scored_are_refused(self, engine: Any) -> None:
        scene = Scene(engine)
        plan = scene.plan([])
        for answer in ((), (1 << 30,), (-1,)):
            with raises(InputError):
                engine.score(plan, answer)
        full = replace(plan, segments=(Segment("text", scene.suffix.token_ids[:1] * (engine.info.max_model_len - 1)),))
        with raises(PromptTooLongError):
            engine.score(full, (1, 2))


def _score(engine: Any, plan: PromptPlan, answer: Sequence[int]) -> tuple[list[list[float]], Any]:
    assert isinstance(engine, Scorer)
    scores, report = engine.score(plan, answer)
    return scores.tolist(), report


def _apart(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> float:
    pairs = [pair for a, b in zip(one, two, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a - b) for a, b in pairs)
