"""How many tokens are prefilled for free, on engines whose times are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from inferscale_mem.testing import FakeEngine
from inferscale_mem.text_tail import QUESTION, ROUNDS, SIZES, free_tokens
from inferscale_mem.types import Chunk, PromptPlan, Sampling


class Timed(FakeEngine):
    """Takes as long as a function of the prompt's length and the number of the request says."""

    def __init__(self, ms: Callable[[int, int], float], max_model_len: int = 4096) -> None:
        super().__init__("a", max_model_len=max_model_len)
        self.ms = ms
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        self.prompts.append(tuple(plan.token_ids))
        for chunk in super().generate(plan, sampling):
            ms = self.ms(len(plan.token_ids), len(self.prompts))
            yield replace(chunk, report=replace(chunk.report, ttft_ms=ms)) if chunk.report else chunk


def measured(ms: Callable[[int, int], float], max_model_len: int = 4096) -> tuple[int, list[tuple[int, ...]]]:
    engine = Timed(ms, max_model_len)
    try:
        return free_tokens(engine), engine.prompts
    finally:
        engine.close()


@pytest.mark.parametrize(("knee", "free"), [(16, 0), (40, 32), (130, 128), (10_000, 512)])
def test_it_ends_where_tokens_begin_to_cost(knee: int, free: int) -> None:
    found, prompts = measured(lambda length, _: 10.0 if length <= knee else 10.0 * length / knee)
    assert found == free
    assert len(set(prompts)) == len(prompts), "no prompt may be found in a prefix cache"
    assert {len(prompt) for prompt in prompts} <= {QUESTION, *SIZES}


def test_where_each_token_costs_little_time_is_spent_on_finding_out() -> None:
    _, prompts = measured(lambda length, _: float(length))
    assert len(prompts) == 2 * (ROUNDS + 1)


def test_single_slow_requests_and_first_ones_do_not_count() -> None:
    assert measured(lambda length, number: 500.0 if number % 12 in (2, 8) else 10.0)[0] == 512


def test_nothing_longer_than_the_context_is_asked() -> None:
    found, prompts = measured(lambda length, _: 10.0, max_model_len=100)
    assert found == 64
    assert max(map(len, prompts)) == 64
