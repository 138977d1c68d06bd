"""What is stored in fewer bits comes back within half a scale, exactly as the format says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_mem.kernels.quantise import dequantise, quantise, round_up

FORMS = [(bits, rows, channels) for bits in (8, 4) for rows in (1, 3, 16) for channels in (1, 4, 12)]


@pytest.mark.parametrize("bits, rows, channels", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_half_a_scale(bits: int, rows: int, channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.logspace(-9, 3, 12)  # channels of very different sizes
    x = (torch.randn(2, 37, 3, 12, generator=generator) * sizes + sizes.flip(0)).to(dtype)
    stored = quantise(x, bits, rows=rows, channels=channels)
    assert stored.shape == x.shape and stored.bits == bits
    assert stored.codes.numel() * 8 == x.numel() * bits
    assert stored.scale.shape == (2, -(-37 // rows), 3, 12 // channels)
    step = stored.scale.float().repeat_interleave(rows, 1)[:, :37].repeat_interleave(channels, 3)
    # Beside half a step: the division's, and the sum's, own rounding.
    error = (dequantise(stored).double() - x.double()).abs()
    assert (error <= step.double() * 0.5001 + x.double().abs() * 2**-22).all()


@pytest.mark.parametrize("bits, rows, channels", [(8, 1, 12), (4, 16, 1), (4, 1, 4)])
def test_some_rows_are_those_rows(bits: int, rows: int, channels: int) -> None:
    x = torch.randn(2, 37, 3, 12, generator=torch.Generator().manual_seed(0))
    stored = quantise(x, bits, rows=rows, channels=channels)
    some = torch.tensor([36, 0, 17, 17])
    assert torch.equal(dequantise(stored, some), dequantise(stored)[:, some])
    assert torch.equal(dequantise(stored[1], some), dequantise(stored)[1, some])


def test_two_codes_to_a_byte() -> None:
    x = torch.arange(16.0).view(1, 1, 16)
    stored = quantise(x, 4)
    assert stored.codes.tolist() == [[[low | low + 8 << 4 for low in range(8)]]]
    assert torch.equal(dequantise(stored), x)


def test_nothing_but_zeros() -> None:
    for bits in (8, 4):
        assert torch.equal(dequantise(quantise(torch.zeros(2, 3, 4), bits)), torch.zeros(2, 3, 4))


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e5, 1e5, width=32))
def test_round_up_is_the_smallest_above(number: float) -> None:
    x = torch.tensor([number])
    above = round_up(x)
    if number > torch.finfo(torch.float16).max:
        assert above.item() == torch.finfo(torch.float16).max
        return
    below = above.nextafter(torch.full_like(above, -torch.inf))
    assert above.float() >= x and (below.float() < x or number < -torch.finfo(torch.float16).max)


@pytest.mark.parametrize("bits, size, channels", [(2, 8, 8), (8, 8, 3), (4, 7, 7)])
def test_no_such_format(bits: int, size: int, channels: int) -> None:
    with pytest.raises(ValueError, match="no format"):
        quantise(torch.zeros(1, 1, size), bits, channels=channels)
