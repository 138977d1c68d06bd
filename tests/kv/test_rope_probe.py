"""Keys of one token at many positions: constant once the right rotation is undone, and only then."""

from __future__ import annotations

import math

import pytest
import torch

from inferscale_mem.kv.rope import RopeTable, rotate, unrotate
from inferscale_mem.kv.rope_probe import TOLERANCE, deviation

POSITIONS, HEADS, HEAD_SIZE = 384, 3, 64


def table(base: float = 1e5, *, divided: float = 1.0, rotary_dim: int = HEAD_SIZE, neox: bool = True) -> RopeTable:
    """As a float32 model has it."""
    frequencies = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim) / divided
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    return RopeTable(angles.cos().float(), angles.sin().float(), neox, torch.float32)


def keys(applied: RopeTable | None, *, noise: float = 0.0, heads: int = HEADS) -> torch.Tensor:
    """What a layer computes for one token at all positions: [T, H, D]; lengths of pairs as different as in a model."""
    generator = torch.Generator().manual_seed(7)
    plain = torch.randn(1, heads, HEAD_SIZE, generator=generator)
    plain *= torch.exp(1.5 * torch.randn(1, heads, HEAD_SIZE, generator=generator))
    plain = plain + noise * torch.randn(POSITIONS, heads, HEAD_SIZE, generator=generator)
    return rotate(plain, torch.arange(POSITIONS), applied)


def off(held: torch.Tensor, undone: RopeTable | None, computed: torch.dtype = torch.bfloat16) -> float:
    """How far they are from constant without a rotation."""
    return deviation(unrotate(held, torch.arange(POSITIONS), undone), undone, computed)


RIGHT = [table(), table(neox=False), table(rotary_dim=32), table(rotary_dim=16, neox=False), None]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rope", RIGHT)
def test_the_right_rotation_leaves_nothing(rope: RopeTable | None, heads: int) -> None:
    assert off(keys(rope, heads=heads), rope, torch.float32) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rope", RIGHT)
def test_rounding_is_no_rotation(rope: RopeTable | None) -> None:
    """Processors without bfloat16 instructions leave each position a little off: much, next to the shortest pairs."""
    held = keys(rope, noise=0.01)
    plain = unrotate(held, torch.arange(POSITIONS), rope)
    assert float(((plain - plain[:1]).abs().amax(dim=0) / plain.abs().mean(dim=0)).max()) > 0.5  # the shortest pairs
    assert off(held, rope) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("applied", "undone"),
    [
        pytest.param(None, table(), id="a rotation that the layer never does"),
        pytest.param(table(), None, id="a rotation nobody undoes"),
        pytest.param(table(1.2e5), table(), id="a base that is off by a fifth"),
        pytest.param(table(1.02e5), table(), id="a base that is off by a fiftieth"),
        pytest.param(table(1e4), table(1e6), id="the other layers' base"),
        pytest.param(table(divided=2), table(), id="a scaling that is not known"),
        pytest.param(table(), table(neox=False), id="the other interleaving"),
        pytest.param(table(rotary_dim=32), table(), id="fewer channels"),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("heads", [1, 3])
def test_any_other_is_seen(applied: RopeTable | None, undone: RopeTable | None, noise: float, heads: int) -> None:
    assert off(keys(applied, noise=noise, heads=heads), undone) > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_few_positions_do(count: int) -> None:
    """A model of a short context, or an engine that asks at few positions, spread out."""
    at = torch.arange(POSITIONS)[:: math.ceil(POSITIONS / count)]
    right, wrong = keys(table())[at], keys(table(1.2e5))[at]
    assert deviation(unrotate(right, at, table()), table(), torch.float32) < TOLERANCE[torch.float32]
    assert (deviation(unrotate(wrong, at, table()), table(), torch.bfloat16) > TOLERANCE[torch.bfloat16]) == (count > 1)


def test_heads_smaller_than_a_window_of_pairs() -> None:
    small = torch.ones(POSITIONS, 1, 4)
    assert deviation(small, None, torch.bfloat16) == 0.0
