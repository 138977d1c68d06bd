"""Rotation on a CPU: the reference's arithmetic, one layer at a time, so that intermediates stay in the cache."""

from __future__ import annotations

import torch

from inferscale_mem.kernels.rope.reference import pairs


def rotate_into(
    out: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool
) -> None:
    """Turn the keys of all layers, each element computed in float32 and rounded once.

    Args:
        out: [L, T, H, D], any float dtype; overwritten. May be ``keys`` itself.
        keys: [L, T, H, D], any float dtype.
        cos: [T, R // 2] float32, R <= D.
        sin: [T, R // 2] float32.
        is_neox_style: channel i pairs with channel R // 2 + i; otherwise 2i with 2i + 1.
    """
    _, tokens, heads, size = keys.shape
    half = cos.shape[-1]
    # Spelled out per head: reading a broadcast operand costs more than the copy.
    cos, sin = (part[:, None].expand(tokens, heads, half).contiguous() for part in (cos, sin))
    plain = torch.empty(tokens, heads, size, dtype=torch.float32)
    product, other = torch.empty(2, tokens, heads, half, dtype=torch.float32)
    first, second = pairs(plain, half, is_neox_style)
    for source, target in zip(keys, out, strict=True):
        plain.copy_(source)
        to_first, to_second = pairs(target, half, is_neox_style)
        # Not addcmul: it may fuse, and then its last bits differ from the reference's.
        to_first.copy_(torch.mul(first, cos, out=product).sub_(torch.mul(second, sin, out=other)))
        to_second.copy_(torch.mul(second, cos, out=product).add_(torch.mul(first, sin, out=other)))
        target[..., 2 * half :].copy_(source[..., 2 * half :])
