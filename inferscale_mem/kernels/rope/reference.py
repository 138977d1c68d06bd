"""Rotation in plain torch: what every faster form is tested against.

A pair of channels (a, b) at one position is turned by that position's (cos, sin): (a·cos - b·sin, b·cos + a·sin).
As complex numbers: (a + ib)(cos + i·sin). See RoFormer (arXiv:2104.09864), section 3.2.2.
"""

from __future__ import annotations

import torch


def pairs(x: torch.Tensor, half: int, is_neox_style: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second channel of each pair.

    Args:
        x: [..., D], D >= 2 * half.
        half: number of pairs; channels from 2 * half on belong to none.
        is_neox_style: channel i pairs with channel half + i; otherwise 2i with 2i + 1.

    Returns:
        Two tensors [..., half] that share memory with ``x``.
    """
    if is_neox_style:
        return x[..., :half], x[..., half : 2 * half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool) -> torch.Tensor:
    """Turn the pairs of channels of every head.

    Args:
        x: [..., T, H, D], any float dtype.
        cos: [T, R // 2] float32, R <= D.
        sin: [T, R // 2] float32.
        is_neox_style: see ``pairs``.

    Returns:
        [..., T, H, D] float32, in new memory; channels from R on as they were.
    """
    turned = x.to(torch.float32, copy=True)
    first, second = pairs(turned, cos.shape[-1], is_neox_style)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    first.copy_(new_first)
    second.copy_(new_second)
    return turned


def inverse(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The (cos, sin) that undo a rotation by the given ones, whatever their length.

    1 / (cos + i·sin) = (cos - i·sin) / (cos² + sin²). The division matters: tables rounded to bfloat16 have lengths up
    to half a per cent from one, and YaRN and longrope scale theirs.

    Args:
        cos: float32, any shape.
        sin: float32, the same shape.

    Returns:
        Two float32 tensors of that shape, correctly rounded up to one unit in the last place.
    """
    exact_cos, exact_sin = cos.double(), sin.double()
    square = exact_cos.square() + exact_sin.square()
    return (exact_cos / square).float(), (-exact_sin / square).float()
