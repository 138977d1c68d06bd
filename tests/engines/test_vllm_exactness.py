"""Injection changes nothing but time: distributions with records of the exact prefix are those of plain prefill."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
from exact import encode, first_token, material, plain

from inferscale_mem.errors import UnsupportedModelError
from inferscale_mem.protocols import Engine
from inferscale_mem.types import Segment

pytestmark = pytest.mark.engine

BLOCK = 32
names = itertools.count()


def segment(kind: Any, length: int, seed: int, record: bool = True) -> Segment:
    return Segment(kind, material(250, length, seed), f"r{next(names)}" if record else None)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_exact_prefix_at_every_remainder(open_tiny: Callable[..., Engine], family: str) -> None:
    engine = open_tiny(family)
    for i in range(BLOCK):
        header, fact = segment("header", BLOCK + i, i), segment("fact", 5 + 7 * i % BLOCK, 100 + i)
        prompt = [header, fact, segment("text", 1 + i % 5, 200 + i, record=False)]
        want = first_token(engine, plain(prompt))
        encode(engine, [], header, fact)
        got = first_token(engine, prompt)
        assert got.report.tokens_injected == len(header.token_ids) + len(fact.token_ids)
        assert got.max_difference(want) < 1e-3, i
        assert first_token(engine, plain(prompt)).max_difference(want) < 1e-5, "plain text saw injected KV"


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_bfloat16_is_as_near_as_rounding_allows(open_tiny: Callable[..., Engine], family: str) -> None:
    """On a CPU this data type has a kernel of its own. Long enough for a sliding window to pass whole blocks."""
    engine = open_tiny(family, {"dtype": "bfloat16"})
    for i in range(0, BLOCK, 5):
        header, fact = segment("header", 3 * BLOCK + i, i), segment("fact", 5 + 7 * i % BLOCK, 100 + i)
        prompt = [header, fact, segment("text", 1 + i % 5, 200 + i, record=False)]
        encode(engine, [], header, fact)
        got = first_token(engine, prompt)
        assert got.report.tokens_injected == len(header.token_ids) + len(fact.token_ids)
        assert first_token(engine, plain(prompt)).kl(got) < 5e-3, i


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_chained_records_are_exact_in_their_own_order(open_tiny: Callable[..., Engine], family: str) -> None:
    engine = open_tiny(family)
    header = segment("header", 19, 0)
    facts = [segment("fact", 9 + n, n) for n in range(1, 7)]
    encode(engine, [], header)
    for n, fact in enumerate(facts):
        encode(engine, [header, *facts[:n]], fact)
    prompt = [header, *facts, segment("text", 4, 99, record=False)]
    got = first_token(engine, prompt)
    assert got.report.tokens_injected == sum(len(s.token_ids) for s in prompt[:-1])
    assert got.max_difference(first_token(engine, plain(prompt))) < 1e-3


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_records_move(open_tiny: Callable[..., Engine], family: str) -> None:
    """With one layer, keys and values depend on nothing but their token: facts encoded alone are exact anywhere."""
    kinds = {"layer_types": ["full_attention"]} if family == "gemma3" else {}
    engine = open_tiny(family, num_hidden_layers=1, **kinds)
    header, facts = segment("header", 37, 0), [segment("fact", 8 + n, n) for n in range(1, 5)]
    encode(engine, [], header)
    for fact in facts:
        encode(engine, [], fact)
    for order in (facts, facts[::-1], [facts[2], facts[0]]):
        prompt = [header, *order, segment("text", 3, 99, record=False)]
        got = first_token(engine, prompt)
        assert got.report.tokens_injected == sum(len(s.token_ids) for s in prompt[:-1])
        assert got.max_difference(first_token(engine, plain(prompt))) < 1e-3


def test_wrong_rope_is_caught_at_start(open_tiny: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding and injecting at the same positions cancels a wrong rotation; the probe at start does not."""
    from inferscale_mem.kv.connector import layers

    real = layers.RopeTable.from_module

    def slower(*args: Any, **kwargs: Any) -> Any:
        table = real(*args, **kwargs)
        angles = (table.sin.atan2(table.cos)[1] * 0.9)[None] * range_like(table.cos)
        return layers.RopeTable(angles.cos(), angles.sin(), table.is_neox_style, table.dtype)

    monkeypatch.setattr(layers.RopeTable, "from_module", slower)
    with pytest.raises(UnsupportedModelError, match="depend on position"):
        open_tiny("llama")


def range_like(cos: Any) -> Any:
    import torch

    return torch.arange(cos.shape[0], dtype=cos.dtype)[:, None]
