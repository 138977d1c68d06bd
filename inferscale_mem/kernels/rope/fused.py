"""What Triton kernels share: channels of keys, read from anywhere, in any format, and turned."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def step_at(step, num_tokens, token, BLOCK_SIZE: tl.constexpr, null_block):  # type: ignore[no-untyped-def]
    """What a ``kernels.paged.Step`` says of tokens [M]: which are to be moved, and their rows, positions and blocks."""
    live = token < num_tokens
    row = tl.load(step + token, mask=live, other=0).to(tl.int64)
    position = tl.load(step + num_tokens + token, mask=live, other=0)
    table = tl.load(step + 2 * num_tokens + token, mask=live, other=0)
    block = tl.load(step + 3 * num_tokens + table + position // BLOCK_SIZE, mask=live, other=0)
    return live & (block != null_block), row, position, block


@triton.jit
def read(  # type: ignore[no-untyped-def]
    source, scales, zeros, at, scale_at, d, live,
    SIZE: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Channels ``d`` of rows that begin at ``source + at``: as they are (BITS 0), or dequantised to float32.

    at, scale_at: [M] int64; d: [C]; live: [M]. Formats: see ``kernels.quantise``. RUN: so many channels, from a
    multiple of it on, follow each other.
    """
    column = tl.max_contiguous(tl.multiple_of(d, RUN), RUN)[None, :]
    mask = live[:, None] & (column < SIZE)
    start = source + at[:, None]
    if BITS == 0:
        found = tl.load(start + column, mask=mask, other=0.0)
    else:
        if BITS == 8:
            codes = tl.load(start + column, mask=mask, other=0).to(tl.float32)
        else:
            half: tl.constexpr = SIZE // 2
            low = d < half
            byte = tl.where(low, d, d - half)
            if half % RUN == 0:
                byte = tl.max_contiguous(tl.multiple_of(byte, RUN), RUN)
            pairs = tl.load(start + byte[None, :], mask=mask, other=0)
            codes = tl.where(low[None, :], pairs & 15, pairs >> 4).to(tl.float32)
        if CHANNELS == SIZE:
            found = codes * tl.load(scales + scale_at, mask=live, other=0.0).to(tl.float32)[:, None]
            if BITS == 4:
                found += tl.load(zeros + scale_at, mask=live, other=0.0).to(tl.float32)[:, None]
        else:
            group = scale_at[:, None] + column // CHANNELS
            found = codes * tl.load(scales + group, mask=mask, other=0.0).to(tl.float32)
            if BITS == 4:
                found += tl.load(zeros + group, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def read_turned(  # type: ignore[no-untyped-def]
    source, scales, zeros, at, scale_at, live, angles, angle_at, START: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Channels START to START + WIDTH of keys, rotated: [M, WIDTH] float32; for the rest, see ``read``.

    ``angles + angle_at`` [M]: ROTARY // 2 cosines, then as many sines. RUN: so many channels, from a multiple of it
    on, have partners and angles that follow each other too (only with NEOX). START and WIDTH are even.
    """
    half: tl.constexpr = ROTARY // 2
    d = START + tl.arange(0, WIDTH)
    run: tl.constexpr = 16 if START % 16 == 0 else 8 if START % 8 == 0 else 1
    own = read(source, scales, zeros, at, scale_at, d, live, SIZE, BITS, CHANNELS, run).to(tl.float32)
    turns = live[:, None] & (d < ROTARY)[None, :]
    cosines = (angles + angle_at)[:, None]
    # In the pair (a, b), a becomes a cos - b sin, and b becomes b cos + a sin.
    if ROTARY > 0:
        if NEOX:
            first = d < half
            partner = tl.where(first, d + half, d - half)
            angle = tl.max_contiguous(tl.multiple_of(tl.where(first, d, d - half), RUN), RUN)[None, :]
            # A second read, which the cache answers.
            other = read(source, scales, zeros, at, scale_at, partner, live, SIZE, BITS, CHANNELS, RUN).to(tl.float32)
            cos = tl.load(cosines + angle, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(cosines + half + angle, mask=turns, other=0.0).to(tl.float32)
            turned = own * cos + other * tl.where(first[None, :], -sin, sin)
        else:
            pair = START // 2 + tl.arange(0, WIDTH // 2)
            turns_pair = live[:, None] & (pair < half)[None, :]
            cos = tl.load(cosines + pair[None, :], mask=turns_pair, other=1.0).to(tl.float32)
            sin = tl.load(cosines + half + pair[None, :], mask=turns_pair, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(own, (own.shape[0], WIDTH // 2, 2)))
            turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (own.shape[0], WIDTH))
        own = tl.where(turns, turned, own)
    return own


def run_of(rotary_dim: int) -> int:
    """RUN of ``read_turned``."""
    half = max(rotary_dim // 2, 1)
    return min(half & -half, 16)


def for_this_machine(configs: list[triton.Config]) -> list[triton.Config]:
    """What an autotuner chooses from; Triton's interpreter has no times to compare."""
    return configs[:1] if triton.knobs.runtime.interpret else configs


EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product that is added to is rounded first, as the references do. These kernels wait for memory."""
