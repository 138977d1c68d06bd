"""What an engine checks about itself at start, with a handful of ordinary requests.

1. *Ropes.* Keys of a prompt that repeats one token must not depend on position once un-rotated (``kv/rope_probe.py``).
   Encoding and injecting at the same positions could not see a wrong rotation, since it cancels out there.
2. *Layout.* A prefix is encoded in two records and injected; the next token's log-probs must be those of plain prefill.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch

from inferscale_mem import wire
from inferscale_mem.config import AUTO
from inferscale_mem.errors import SelfTestError, UnsupportedModelError
from inferscale_mem.kv.rope_probe import TOLERANCE
from inferscale_mem.types import EncodePlan, EngineInfo, PromptPlan, Segment, Span

logger = logging.getLogger(__name__)

Ask = Callable[..., Awaitable[Any]]
Logprobs = Callable[[list[int], dict[str, Any], int], Awaitable[tuple[Mapping[int, float], Any]]]

PROBE_TOKENS = 384
MAX_KL = {"float32": 1e-4}
OTHER_MAX_KL = 0.05
"""Nats, over the most likely tokens. Rounding gives some 1e-6 in float32 and 0.002 in bfloat16, a wrong layout several;
rows that are off by one may give less than 0.05, which only float32 can tell."""
TOP = 50
ROPE = "self-test.rope"
LAYOUT = ("self-test.header", "self-test.fact")


async def run_self_test(info: EngineInfo, vocab_size: int, ask: Ask, logprobs: Logprobs, *, top: int = TOP) -> None:
    """Check ropes, then layout.

    Args:
        info: of the engine.
        vocab_size: of the model.
        ask: sends (kv_transfer_params, token ids), returns the connector's answer.
        logprobs: sends (token ids, kv_transfer_params, top), returns first-token log-probs and the answer.
        top: over how many of the most likely tokens answers are compared.

    Raises:
        UnsupportedModelError: a layer's rotation is not the one we undo.
        SelfTestError: injected KV gives other answers than plain prefill.
    """
    logger.info("Comparing injected with plain answers")
    tokens = random.Random(0).choices(range(vocab_size // 8, vocab_size // 2), k=PROBE_TOKENS + info.block_size)
    await _check_ropes(info, tokens[0], ask)
    await ask(wire.drop_params([ROPE]))
    await _check_layout(info, tokens, ask, logprobs, top)
    await ask(wire.drop_params(LAYOUT))


async def _check_ropes(info: EngineInfo, token: int, ask: Ask) -> None:
    length = min(PROBE_TOKENS, info.max_model_len - 1, info.record_bytes // info.bytes_per_token)
    tokens = (token,) * length
    plan = EncodePlan((Segment("text", tokens),), (Span(ROPE, 0, length),))
    await ask(wire.encode_params(plan, op="probe"), tokens)
    deviations = (await ask(wire.status_params()))["deviations"]
    if not deviations:
        raise SelfTestError("The workers did not report the rope probe; is this the tested vLLM version?")
    limit = TOLERANCE[getattr(torch, info.dtype)]
    wrong = {layer: value for layer, value in deviations.items() if not value <= limit}
    if wrong:
        worst = max(wrong, key=lambda layer: wrong[layer])
        raise UnsupportedModelError(
            info.model,
            [
                f"keys of {len(wrong)} of {len(deviations)} layers depend on position after their rotation is undone "
                f"(worst: {worst}, {wrong[worst]:.2g} relative), so its positional encoding is not the one known here"
            ],
        )


async def _check_layout(info: EngineInfo, material: list[int], ask: Ask, logprobs: Logprobs, top: int) -> None:
    header, fact, rest = info.block_size + 5, 7, 3
    if header + fact + rest >= info.max_model_len or (header + fact) * info.bytes_per_token > info.record_bytes:
        header, fact, rest = 5, 4, 2
    tokens = material[: header + fact + rest]
    parts = (tuple(tokens[:header]), tuple(tokens[header : header + fact]), tuple(tokens[header + fact :]))
    plan = EncodePlan(
        tuple(Segment("text", part) for part in parts),
        (Span(LAYOUT[0], 0, header), Span(LAYOUT[1], header, header + fact)),
    )
    encoded = wire.encode_report(plan, await ask(wire.encode_params(plan), tokens))
    if set(encoded.encoded) != set(LAYOUT):
        raise SelfTestError(f"Records were not made at start: {encoded.refused}")
    stored = [Segment("header", part, name) for part, name in zip(parts, LAYOUT, strict=False)]
    segments = (*stored, Segment("text", parts[2]))
    plain, _ = await logprobs(tokens, {}, top)
    injected, answer = await logprobs(tokens, wire.inject_params(PromptPlan(segments)), top)
    if not answer or answer.get("tokens_injected") != header + fact:
        raise SelfTestError(f"Records were made but not injected at start: {answer}")
    kl = divergence(plain, injected)
    if not kl <= max_kl(info):
        raise SelfTestError(
            f"With injected KV, {info.model} answers differently than with plain prefill (KL {kl:.3g} nats over the "
            f"{top} most likely tokens). Please report model, GPU and vLLM version; connector=False serves without "
            "memory."
        )


def max_kl(info: EngineInfo) -> float:
    """How far injected answers may be from plain ones, in nats, see ``divergence``."""
    return MAX_KL.get(info.dtype, OTHER_MAX_KL) if info.record_dtype == AUTO else OTHER_MAX_KL


def divergence(plain: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL divergence in nats over the tokens both name, the rest taken as one token."""
    common = plain.keys() & other.keys()
    p = [math.exp(plain[token]) for token in common]
    q = [math.exp(other[token]) for token in common]
    p.append(max(1 - sum(p), 1e-9))
    q.append(max(1 - sum(q), 1e-9))
    return sum(a * (math.log(max(a, 1e-12)) - math.log(max(b, 1e-12))) for a, b in zip(p, q, strict=True))
