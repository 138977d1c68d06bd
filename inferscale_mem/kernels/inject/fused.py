"""Inject in one launch of Triton: all layers and all tokens of a step, dequantised, rotated, into a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from inferscale_mem.kernels.paged import PagedCaches, Step
from inferscale_mem.kernels.quantise import Stored, parts_of
from inferscale_mem.kernels.rope.fused import EXACT, for_this_machine, read, read_turned, run_of, step_at

_CONFIGS = [
    triton.Config({"ROWS": rows, "LAYERS": layers}, num_warps=warps)
    for rows, layers, warps in ((32, 1, 4), (16, 1, 4), (64, 1, 8), (32, 4, 4), (16, 4, 4), (64, 2, 8))
]


class Injector:
    """Writes rows of a slab into the paged caches of some of its layers.

    Args:
        keys: before RoPE, [L, R, H, D], contiguous: floats, or in fewer bits.
        values: likewise.
        layers: which of the L; as many as ``caches`` has.
        caches: of those layers, on the device of ``keys``.
    """

    def __init__(self, keys: Stored, values: Stored, layers: Sequence[int], caches: PagedCaches) -> None:
        assert tuple(keys.shape) == tuple(values.shape) and len(layers) == len(caches)
        self._keys, self._values, self._caches = parts_of(keys), parts_of(values), caches
        self._layers = torch.tensor(layers, dtype=torch.int32, device=caches.device)
        _, rows, heads, size = keys.shape
        self._numbers = {
            "NUM_ROWS": rows, "HEADS": heads, "SIZE": size, "PADDED": triton.next_power_of_2(size),
            "KEY_BITS": self._keys[3], "KEY_SHARED": self._keys[4], "KEY_CHANNELS": self._keys[5],
            "VALUE_BITS": self._values[3], "VALUE_SHARED": self._values[4], "VALUE_CHANNELS": self._values[5],
            "BLOCK_SIZE": caches.block_size, "BLOCK_STRIDE": caches.block_stride, "TOKEN_STRIDE": caches.token_stride,
            "HEAD_STRIDE": caches.head_stride, "ALIGNED": caches.aligned,
        }  # fmt: skip

    def __call__(self, step: Step, cos_sin_cache: torch.Tensor, is_neox_style: bool, null_block: int = -1) -> None:
        """Write a step's tokens; asynchronous, as a kernel is.

        Args:
            step: which rows to write, and where; on the device of the caches.
            cos_sin_cache: [positions, rotary_dim] float, contiguous: cosines, then sines. No columns: no rotation.
            is_neox_style: see ``kernels.rope``.
            null_block: tokens of this block are left out.
        """
        rotary = cos_sin_cache.shape[1]
        if not step.num_tokens:
            return
        heads, layers = self._numbers["HEADS"], len(self._layers)
        _kernel[lambda meta: (triton.cdiv(step.num_tokens * heads, meta["ROWS"]), triton.cdiv(layers, meta["LAYERS"]))](
            step.numbers, step.num_tokens, self._layers, layers, *self._keys[:3], *self._values[:3],
            self._caches.keys, self._caches.values, self._caches.sample, cos_sin_cache, null_block,
            **self._numbers, ROTARY=rotary, NEOX=is_neox_style, RUN=run_of(rotary), **EXACT,
        )  # fmt: skip


@triton.autotune(
    configs=for_this_machine(_CONFIGS),
    key=["HEADS", "SIZE", "KEY_BITS", "VALUE_BITS", "TOKEN_STRIDE", "ROTARY", "NEOX"],
)
@triton.jit(do_not_specialize=["num_tokens", "num_layers", "null_block"])
def _kernel(  # type: ignore[no-untyped-def]
    step, num_tokens, layers, num_layers, keys, key_scales, key_zeros, values, value_scales, value_zeros,
    key_caches, value_caches, sample, angles, null_block,
    NUM_ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_SHARED: tl.constexpr, KEY_CHANNELS: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_SHARED: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of a token's head, heads of a token following each other
    token = number // HEADS
    head = number % HEADS
    live, row, position, block = step_at(step, num_tokens, token, BLOCK_SIZE, null_block)
    target = block.to(tl.int64) * BLOCK_STRIDE + (position % BLOCK_SIZE) * TOKEN_STRIDE + head * HEAD_STRIDE
    angle_at = position.to(tl.int64) * ROTARY
    d = tl.arange(0, PADDED)
    mask = live[:, None] & (d < SIZE)[None, :]
    place = target[:, None] + d[None, :]
    key_width: tl.constexpr = SIZE // 2 if KEY_BITS == 4 else SIZE
    value_width: tl.constexpr = SIZE // 2 if VALUE_BITS == 4 else SIZE
    kind = tl.pointer_type(sample.dtype.element_ty)
    for k in range(LAYERS):
        index = tl.program_id(1) * LAYERS + k
        if index < num_layers:
            layer = tl.load(layers + index).to(tl.int64)
            at = (layer * NUM_ROWS + row) * HEADS + head
            group = (layer * ((NUM_ROWS + KEY_SHARED - 1) // KEY_SHARED) + row // KEY_SHARED) * HEADS + head
            turned = read_turned(
                keys, key_scales, key_zeros, at * key_width, group * (SIZE // KEY_CHANNELS), live, angles, angle_at, 0,
                PADDED, SIZE, KEY_BITS, KEY_CHANNELS, ROTARY, NEOX, RUN,
            )  # fmt: skip
            cache = tl.multiple_of(tl.load(key_caches + index).to(kind), ALIGNED)
            tl.store(cache + place, turned.to(sample.dtype.element_ty), mask=mask)
            group = (layer * ((NUM_ROWS + VALUE_SHARED - 1) // VALUE_SHARED) + row // VALUE_SHARED) * HEADS + head
            found = read(
                values, value_scales, value_zeros, at * value_width, group * (SIZE // VALUE_CHANNELS), d, live,
                SIZE, VALUE_BITS, VALUE_CHANNELS, 16,
            )  # fmt: skip
            cache = tl.multiple_of(tl.load(value_caches + index).to(kind), ALIGNED)
            tl.store(cache + place, found.to(sample.dtype.element_ty), mask=mask)
