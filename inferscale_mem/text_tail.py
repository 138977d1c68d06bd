"""How many tokens an engine prefills at no measurable cost: room for facts that are left to prefill with the question.

On a GPU, computing a few tokens takes as long as computing some hundred: reading the weights takes the time. There the
most relevant facts can be prefilled, and lose nothing, for free. On a CPU each token has its price.
"""

from __future__ import annotations

import logging
import secrets
import statistics

from inferscale_mem.protocols import Engine
from inferscale_mem.types import PromptPlan, Sampling, Segment

logger = logging.getLogger(__name__)

QUESTION = 16
"""Tokens of a short question: what has to be prefilled anyway."""
SIZES = (32, 64, 128, 256, 512)
ROUNDS = 5
TOLERANCE = 1.05
"""Longer than this many times a question's time is a cost."""


def free_tokens(engine: Engine) -> int:
    """The most tokens (of SIZES) whose prefill takes as long as a short question's; 0 if each token has its price.

    Prompts of both lengths are timed in turns; the first size that costs something ends it.
    """
    free = 0
    for size in SIZES:
        if size >= engine.info.max_model_len or not _costs_nothing(engine, size):
            break
        free = size
    logger.info("%d tokens are prefilled at no measurable cost", free)
    return free


def _costs_nothing(engine: Engine, size: int) -> bool:
    times: dict[int, list[float]] = {QUESTION: [], size: []}
    for turn in range(ROUNDS + 1):
        for length, found in times.items():
            spent = _ttft_ms(engine, length)
            if turn:  # the first of a size may compile something
                found.append(spent)
    return statistics.median(times[size]) <= TOLERANCE * statistics.median(times[QUESTION])


def _ttft_ms(engine: Engine, length: int) -> float:
    """Of a prompt that no cache knows."""
    tokens = tuple(engine.tokenizer.encode(secrets.token_hex(8 * length), literal=True)[:length])
    plan = PromptPlan((Segment("text", tokens),))
    report = [chunk.report for chunk in engine.generate(plan, Sampling(max_tokens=1, temperature=0.0))][-1]
    assert report is not None and report.ttft_ms is not None, "an answer has a first token"
    return report.ttft_ms
