"""Extract in one launch of Triton: all layers and all tokens of a step, the rotation undone, quantised if so stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from inferscale_mem.kernels.paged import PagedCaches, Step
from inferscale_mem.kernels.quantise import Stored, parts_of
from inferscale_mem.kernels.rope.fused import EXACT, for_this_machine, read_turned, run_of, step_at

_CONFIGS = [
    triton.Config({"ROWS": rows, "LAYERS": layers}, num_warps=warps)
    for rows, layers, warps in ((32, 1, 4), (16, 1, 4), (64, 1, 8), (16, 4, 4))
]


class Extractor:
    """Keeps tokens of some layers' paged caches in rows of a slab.

    Args:
        keys: before RoPE, [L, R, H, D], contiguous; written to. Floats, or in fewer bits with scales for each row.
        values: likewise.
        layers: which of the L; as many as ``caches`` has.
        caches: of those layers, on the device of ``keys``.

    Raises:
        ValueError: rows that share a scale, which needs all of them at once: keep floats, and quantise whole records.
            Or channels that do not fit: they must be a head's, or a power of two that divides a head (int8) or half
            of one (int4, whose heads must be a multiple of 4).
    """

    def __init__(self, keys: Stored, values: Stored, layers: Sequence[int], caches: PagedCaches) -> None:
        assert tuple(keys.shape) == tuple(values.shape) and len(layers) == len(caches)
        self._keys, self._values, self._caches = parts_of(keys), parts_of(values), caches
        _, rows, heads, size = keys.shape
        for *_, bits, shared, channels in (self._keys, self._values):
            part = size // 2 if bits == 4 else size
            fits = channels == size or (channels & (channels - 1) == 0 and part % channels == 0)
            if bits and (shared > 1 or not fits or (bits == 4 and size % 4)):
                raise ValueError(f"cannot quantise on the way: {shared} rows, {channels} of {size} channels")
        self._layers = torch.tensor(layers, dtype=torch.int32, device=caches.device)
        self._numbers = {
            "NUM_ROWS": rows, "HEADS": heads, "SIZE": size, "PADDED": triton.next_power_of_2(size),
            "KEY_BITS": self._keys[3], "KEY_CHANNELS": self._keys[5],
            "VALUE_BITS": self._values[3], "VALUE_CHANNELS": self._values[5],
            "BLOCK_SIZE": caches.block_size, "BLOCK_STRIDE": caches.block_stride, "TOKEN_STRIDE": caches.token_stride,
            "HEAD_STRIDE": caches.head_stride, "ALIGNED": caches.aligned,
        }  # fmt: skip

    def __call__(self, step: Step, undo: torch.Tensor, is_neox_style: bool, null_block: int = -1) -> None:
        """Keep a step's tokens; asynchronous, as a kernel is.

        Args:
            step: which rows to write, and where they are; on the device of the caches.
            undo: [T, rotary_dim] float32, contiguous: cosines, then sines, of what undoes each token's rotation (see
                ``kernels.rope.reference.inverse``). No columns: they are not rotated.
            is_neox_style: see ``kernels.rope``.
            null_block: tokens of this block are left out.
        """
        rotary = undo.shape[1]
        if not step.num_tokens:
            return
        heads, layers = self._numbers["HEADS"], len(self._layers)
        _kernel[lambda meta: (triton.cdiv(step.num_tokens * heads, meta["ROWS"]), triton.cdiv(layers, meta["LAYERS"]))](
            step.numbers, step.num_tokens, self._layers, layers, *self._keys[:3], *self._values[:3],
            self._caches.keys, self._caches.values, self._caches.sample, undo, null_block,
            **self._numbers, ROTARY=rotary, NEOX=is_neox_style, RUN=run_of(rotary), **EXACT,
        )  # fmt: skip


@triton.jit
def _round_up(x):  # type: ignore[no-untyped-def]
    """``kernels.quantise.round_up``."""
    near = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    above = tl.where(near == 0, 1, tl.where(bits >= 0, bits + 1, bits - 1)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((near.to(tl.float32) < x) & (near.to(tl.float32) < 65504.0), above, near)


@triton.jit
def _codes(x, scale, MAGIC: tl.constexpr = 12582912.0):  # type: ignore[no-untyped-def]
    """Nearest whole numbers, ties to even: what is added and taken away leaves no place for a fraction."""
    scale = scale.to(tl.float32)
    return tl.where(scale > 0, tl.div_rn(x, tl.where(scale > 0, scale, 1.0)) + MAGIC - MAGIC, 0.0)


@triton.jit
def _spread(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M, G] -> [M, G * COUNT], each COUNT times in a row."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], COUNT))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * COUNT))


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    source, target, scales, zeros, place, row, live, angles, angle_at,
    PADDED: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr, ROTARY: tl.constexpr,
    NEOX: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Heads [M] of a cache, at ``source + place``, turned, into rows ``row`` of what is stored; all [M]."""
    groups: tl.constexpr = SIZE // CHANNELS
    if BITS == 4:
        half: tl.constexpr = SIZE // 2
        width: tl.constexpr = PADDED // 2
        i = tl.arange(0, width)
        ours = (i < half)[None, :]
        first = read_turned(
            source, source, source, place, place, live, angles, angle_at, 0, width, SIZE, 0, SIZE, ROTARY, NEOX, RUN
        )
        second = read_turned(
            source, source, source, place, place, live, angles, angle_at, half, width, SIZE, 0, SIZE, ROTARY, NEOX, RUN
        )
        low_first, high_first = tl.where(ours, first, float("inf")), tl.where(ours, first, float("-inf"))
        low_second, high_second = tl.where(ours, second, float("inf")), tl.where(ours, second, float("-inf"))
        if groups == 1:
            low = tl.minimum(tl.min(low_first, 1), tl.min(low_second, 1))
            high = tl.maximum(tl.max(high_first, 1), tl.max(high_second, 1))
            zero = -_round_up(-low)
            base = zero.to(tl.float32)
            scale = _round_up(tl.div_rn(high - base, tl.full(high.shape, 15.0, tl.float32)))
            tl.store(scales + row, scale, mask=live)
            tl.store(zeros + row, zero, mask=live)
            a, b = _codes(first - base[:, None], scale[:, None]), _codes(second - base[:, None], scale[:, None])
        else:
            shape: tl.constexpr = (first.shape[0], width // CHANNELS, CHANNELS)
            g = tl.arange(0, width // CHANNELS)[None, :]
            kept = live[:, None] & (g < half // CHANNELS)
            at = row[:, None] * groups + g
            a = _codes_in_groups(first, low_first, high_first, scales + at, zeros + at, kept, shape, CHANNELS)
            at += half // CHANNELS
            b = _codes_in_groups(second, low_second, high_second, scales + at, zeros + at, kept, shape, CHANNELS)
        a = tl.minimum(tl.maximum(a, 0.0), 15.0).to(tl.int32)
        b = tl.minimum(tl.maximum(b, 0.0), 15.0).to(tl.int32)
        tl.store(target + row[:, None] * half + i[None, :], (a | (b << 4)).to(tl.uint8), mask=live[:, None] & ours)
    else:
        d = tl.arange(0, PADDED)[None, :]
        mask = live[:, None] & (d < SIZE)
        x = read_turned(
            source, source, source, place, place, live, angles, angle_at, 0, PADDED, SIZE, 0, SIZE, ROTARY, NEOX, RUN
        )
        if BITS == 8:
            if groups == 1:
                highest = tl.max(tl.abs(x), 1)
                scale = _round_up(tl.div_rn(highest, tl.full(highest.shape, 127.0, tl.float32)))
                tl.store(scales + row, scale, mask=live)
                x = _codes(x, scale[:, None])
            else:
                highest = tl.max(tl.reshape(tl.abs(x), (x.shape[0], PADDED // CHANNELS, CHANNELS)), 2)
                scale = _round_up(tl.div_rn(highest, tl.full(highest.shape, 127.0, tl.float32)))
                g = tl.arange(0, PADDED // CHANNELS)[None, :]
                tl.store(scales + row[:, None] * groups + g, scale, mask=live[:, None] & (g < groups))
                x = _codes(x, _spread(scale, CHANNELS))
            x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        tl.store(target + row[:, None] * SIZE + d, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _codes_in_groups(x, low, high, scales, zeros, kept, SHAPE: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """4-bit codes [M, C] as floats, where each CHANNELS channels have a scale and a zero, which are stored."""
    low, high = tl.min(tl.reshape(low, SHAPE), 2), tl.max(tl.reshape(high, SHAPE), 2)
    low, high = tl.where(kept, low, 0.0), tl.where(kept, high, 0.0)
    zero = -_round_up(-low)
    base = zero.to(tl.float32)
    scale = _round_up(tl.div_rn(high - base, tl.full(high.shape, 15.0, tl.float32)))
    tl.store(scales, scale, mask=kept)
    tl.store(zeros, zero, mask=kept)
    return _codes(x - _spread(base, CHANNELS), _spread(scale, CHANNELS))


@triton.autotune(
    configs=for_this_machine(_CONFIGS),
    key=["HEADS", "SIZE", "KEY_BITS", "VALUE_BITS", "TOKEN_STRIDE", "ROTARY", "NEOX"],
)
@triton.jit(do_not_specialize=["num_tokens", "num_layers", "null_block"])
def _kernel(  # type: ignore[no-untyped-def]
    step, num_tokens, layers, num_layers, keys, key_scales, key_zeros, values, value_scales, value_zeros,
    key_caches, value_caches, sample, angles, null_block,
    NUM_ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_CHANNELS: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of a token's head, heads of a token following each other
    token = number // HEADS
    head = number % HEADS
    live, row, position, block = step_at(step, num_tokens, token, BLOCK_SIZE, null_block)
    place = block.to(tl.int64) * BLOCK_STRIDE + (position % BLOCK_SIZE) * TOKEN_STRIDE + head * HEAD_STRIDE
    angle_at = token.to(tl.int64) * ROTARY
    kind = tl.pointer_type(sample.dtype.element_ty)
    for k in range(LAYERS):
        index = tl.program_id(1) * LAYERS + k
        if index < num_layers:
            target = (tl.load(layers + index).to(tl.int64) * NUM_ROWS + row) * HEADS + head
            cache = tl.multiple_of(tl.load(key_caches + index).to(kind), ALIGNED)
            _keep(
                cache, keys, key_scales, key_zeros, place, target, live, angles, angle_at, PADDED, SIZE, KEY_BITS,
                KEY_CHANNELS, ROTARY, NEOX, RUN,
            )  # fmt: skip
            cache = tl.multiple_of(tl.load(value_caches + index).to(kind), ALIGNED)
            _keep(
                cache, values, value_scales, value_zeros, place, target, live, angles, angle_at, PADDED, SIZE,
                VALUE_BITS, VALUE_CHANNELS, 0, NEOX, 1,
            )  # fmt: skip
