"""Exactness on the real model, as users run it (beside this process, in what suits the processor) and in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from exact import encode, first_token, plain

from inferscale_mem.config import EngineConfig
from inferscale_mem.protocols import Engine
from inferscale_mem.types import Segment

pytestmark = pytest.mark.engine

FACTS = ["I am allergic to peanuts.", "My dog is called Biscuit.", "I work as a nurse in Oslo.", "My sister is Ada."]


def conversation(engine: Engine, padding: int, tag: str) -> list[Segment]:
    """Header, facts and question as a prompt has them; ``padding`` moves every boundary by so many tokens."""
    tokens = engine.tokenizer
    header = f"<|im_start|>system\nYou are kind.{' very' * padding} What you know about the user:\n"
    question = "<|im_end|>\n<|im_start|>user\nWhat is my dog called?<|im_end|>\n<|im_start|>assistant\n"
    facts = [
        Segment("fact", tuple(tokens.encode(f"- {fact}\n", literal=True)), f"{tag}.{padding}.{n}")
        for n, fact in enumerate(FACTS)
    ]
    return [
        Segment("header", tuple(tokens.encode(header, literal=False)), f"{tag}.{padding}"),
        *facts,
        Segment("text", tuple(tokens.encode(question, literal=False))),
    ]


def inject_chained(engine: Engine, prompt: list[Segment]) -> None:
    for n, segment in enumerate(prompt[:-1]):
        encode(engine, prompt[:n], segment)


NEAR = {"bfloat16": 5e-3, "float32": 1e-5}
"""KL that rounding allows."""


def test_answers_are_as_near_as_rounding_allows(vllm_engine: Engine) -> None:
    found = []
    for padding in range(0, 36, 3):
        prompt = conversation(vllm_engine, padding, "bf16")
        inject_chained(vllm_engine, prompt)
        got = first_token(vllm_engine, prompt)
        assert got.report.tokens_injected == sum(len(s.token_ids) for s in prompt[:-1])
        found.append(first_token(vllm_engine, plain(prompt)).kl(got))
    assert max(found) < NEAR[vllm_engine.info.dtype], found


def test_how_much_of_a_prompt_was_cached(vllm_engine: Engine) -> None:
    """Nothing, whole blocks of a text that is sent again, or what was injected."""
    prompt = conversation(vllm_engine, 2 * vllm_engine.info.block_size, "cached")
    total = sum(len(segment.token_ids) for segment in prompt)
    blocks = (total - 1) // vllm_engine.info.block_size * vllm_engine.info.block_size
    found = [first_token(vllm_engine, plain(prompt)).report.tokens_cached for _ in range(2)]
    assert found == [0, blocks] and 0 < blocks < total
    inject_chained(vllm_engine, prompt)
    injected = first_token(vllm_engine, prompt).report
    assert injected.tokens_cached == injected.tokens_injected == total - len(prompt[-1].token_ids)


@pytest.fixture(scope="module")
def float32_engine(smollm2_path: str) -> Iterator[Engine]:
    from inferscale_mem.engines.vllm_local import VllmEngine

    sizes = {"block_size": 32, "max_model_len": 1024, "kv_cache_bytes": 128 << 20, "record_bytes": 64 << 20}
    config = EngineConfig(multiprocess=False, dtype="float32", **sizes)
    engine = VllmEngine(smollm2_path, config)
    yield engine
    engine.close()


def test_records_in_8_bits_take_less_room_and_are_near(smollm2_path: str, vllm_engine: Engine) -> None:
    from inferscale_mem.engines.vllm_local import VllmEngine

    sizes = {"max_model_len": 1024, "kv_cache_bytes": 128 << 20, "record_bytes": 32 << 20}
    engine = VllmEngine(smollm2_path, EngineConfig(multiprocess=False, record_dtype="int8", **sizes))
    try:
        assert engine.info.record_dtype == "int8" and engine.info.fingerprint != vllm_engine.info.fingerprint
        whole = 64 * getattr(torch, engine.info.dtype).itemsize
        assert engine.info.bytes_per_token / vllm_engine.info.bytes_per_token == pytest.approx((64 + 2) / whole)
        found = []
        for padding in (0, 7, 21):
            prompt = conversation(engine, padding, "int8")
            inject_chained(engine, prompt)
            got = first_token(engine, prompt)
            assert got.report.tokens_injected == sum(len(s.token_ids) for s in prompt[:-1])
            found.append(first_token(engine, plain(prompt)).kl(got))
        assert max(found) < 2e-2, found
    finally:
        engine.close()


def test_float32_is_exact_at_every_remainder(float32_engine: Engine) -> None:
    found = []
    for padding in range(32):
        prompt = conversation(float32_engine, padding, "fp32")
        encode(float32_engine, [], *prompt[:-1])
        got = first_token(float32_engine, prompt)
        assert got.report.tokens_injected == sum(len(s.token_ids) for s in prompt[:-1])
        found.append(first_token(float32_engine, plain(prompt)).max_difference(got))
    assert max(found) < 1e-3, found


def test_float32_chained_is_exact(float32_engine: Engine) -> None:
    prompt = conversation(float32_engine, 40, "chain")
    inject_chained(float32_engine, prompt)
    assert first_token(float32_engine, prompt).max_difference(first_token(float32_engine, plain(prompt))) < 1e-3
