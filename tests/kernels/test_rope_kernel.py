"""The rotation kernels against complex numbers in float64, and the CPU form against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_mem.kernels.rope import cpu, reference

UNIT = 2.0**-24
"""Rounding to float32: relative error of one operation."""


def as_complex(x: torch.Tensor, half: int, is_neox_style: bool) -> torch.Tensor:
    """[..., D] -> [..., half] complex128, one number per pair."""
    rotated = x[..., : 2 * half].double()
    shape = (2, half) if is_neox_style else (half, 2)
    parts = rotated.unflatten(-1, shape).movedim(-2 if is_neox_style else -1, 0)
    return torch.complex(parts[0].contiguous(), parts[1].contiguous())


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """keys [L, T, H, D], cos and sin [T, R // 2] of lengths from 0.5 to 2, style."""
    layers, tokens, heads = draw(st.integers(0, 3)), draw(st.integers(0, 9)), draw(st.integers(1, 4))
    half, passed = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    keys = torch.randn(tokens, layers, heads, 2 * half + passed, generator=generator)
    keys = keys.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))).transpose(0, 1)
    angle, length = 6.3 * torch.rand(2, tokens, half, generator=generator)
    length = 0.5 + length / 4.2
    return keys, length * angle.cos(), length * angle.sin(), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(problems())
def test_reference_multiplies_complex_numbers(problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]) -> None:
    keys, cos, sin, style = problem
    half = cos.shape[-1]
    before = keys.clone()
    turned = reference.rotate(keys, cos, sin, style)
    exact = as_complex(keys, half, style) * torch.complex(cos.double(), sin.double())[:, None]
    error = (as_complex(turned, half, style) - exact).abs()
    assert turned.dtype == torch.float32
    assert (error <= 3 * UNIT * exact.abs()).all()
    assert torch.equal(turned[..., 2 * half :], keys[..., 2 * half :].float())
    assert torch.equal(keys, before)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_inverse_is_the_reciprocal(problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]) -> None:
    _, cos, sin, _ = problem
    exact = 1 / torch.complex(cos.double(), sin.double())
    back_cos, back_sin = reference.inverse(cos, sin)
    assert ((back_cos - exact.real).abs() <= 1.001 * UNIT * exact.real.abs()).all()
    assert ((back_sin - exact.imag).abs() <= 1.001 * UNIT * exact.imag.abs()).all()


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_cpu_form_equals_the_reference(
    problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool], dtype: torch.dtype
) -> None:
    keys, cos, sin, style = problem
    out = torch.full(keys.shape, float("nan"), dtype=dtype)
    cpu.rotate_into(out, keys, cos, sin, style)
    assert torch.equal(out, reference.rotate(keys, cos, sin, style).to(dtype))


@pytest.mark.parametrize("style", [True, False])
def test_cpu_form_in_place(style: bool) -> None:
    keys = torch.randn(2, 7, 3, 10).to(torch.bfloat16)
    cos, sin = torch.rand(2, 7, 4)
    expected = reference.rotate(keys, cos, sin, style).to(keys.dtype)
    cpu.rotate_into(keys, keys, cos, sin, style)
    assert torch.equal(keys, expected)
