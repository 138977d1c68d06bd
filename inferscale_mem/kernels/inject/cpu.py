"""Inject on a CPU, bfloat16: slab to paged cache in one pass, without a copy in between.

A run of tokens that share a block is rotated into a small tile that stays in the processor's first-level cache, and
from there written in the order in which the backend packs a block. What is read is asked for some rows ahead, and whole
cache lines are written past the cache, which otherwise would first read what is about to be overwritten (what each
step gains: docs/decisions/0019). Compiled by numba when imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types

from inferscale_mem.kernels.compiling import HALF_WORD, ONE, TWO, ZERO, inline, jit
from inferscale_mem.kernels.inject.layout import FORMS, BlockLayout
from inferscale_mem.kernels.inject.packed import put
from inferscale_mem.kernels.instructions import LINE, as_bits, as_float, fetch, finish_streams, pointer, take, turn_line
from inferscale_mem.kernels.openmp import on_all_threads

Array = np.ndarray[Any, Any]

_LONGEST_RUN = 32
"""Tokens; a tile of more would leave the first-level cache."""
CACHE_LINE = 4 * int(LINE)
"""Bytes."""
_AHEAD = np.uint64(12)
"""Rows; so many before one is read, it is asked for."""


class Injector:
    """Writes rows of a slab into the paged caches of some of its layers.

    Args:
        keys: before RoPE, bfloat16 [L, R, H, D], contiguous.
        values: likewise.
        layers: which of the L.
        caches: one per layer: contiguous bfloat16, a whole number of blocks, from the start of a cache line on.
        key_layout, value_layout: of a block of theirs.
        threads: to use, this one included.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layers: Sequence[int],
        caches: Sequence[torch.Tensor],
        key_layout: BlockLayout,
        value_layout: BlockLayout,
        threads: int = 1,
    ) -> None:
        tensors = (keys, values, *caches)
        assert all(t.dtype == torch.bfloat16 and t.is_contiguous() and t.device.type == "cpu" for t in tensors)
        assert all(cache.data_ptr() % CACHE_LINE == 0 for cache in caches)
        self._kept = tensors  # the addresses below are theirs
        self._run = int(np.gcd.reduce([key_layout.group, value_layout.group, _LONGEST_RUN]))
        heads, size = keys.shape[2:]
        self._layers = np.asarray(layers, dtype=np.uint64)
        addresses = np.asarray([cache.data_ptr() for cache in caches], dtype=np.uint64)
        layouts = (key_layout, value_layout)
        self._numbers = (
            *keys.shape[1:], caches[0].numel(), caches[0][0].numel(),
            *(n for layout in layouts for n in (FORMS.index(layout.form), layout.head_stride, layout.chunk)),
        )  # fmt: skip
        self._arrays = (
            self._layers, addresses, _bits(keys), _bits(values),
            *(array for layout in layouts for array in (layout.token, layout.channel)),
        )  # fmt: skip
        self._threads = threads
        words = self._run * heads * size // 2 + (int(LINE) + 1) * self._run + size  # a tile, and lines to send
        self._scratch = torch.empty((threads, -(-words // 16) * 64), dtype=torch.uint8)

    def __call__(
        self,
        rows: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        is_neox_style: bool,
    ) -> None:
        """Write rows; arguments as in ``reference.inject``. ``rotary_dim`` 0 rotates nothing."""
        half = cos.shape[1]
        if not len(rows):
            return
        starts = _runs(blocks.numpy(), offsets.numpy(), self._run)
        where = [part.numpy().astype(np.uint64) for part in (rows, blocks, offsets)]
        angles = [part.contiguous().numpy().reshape(-1) for part in (cos, sin)]
        runs = len(starts) - 1
        pieces = len(self._layers) * runs
        # A few pieces at a time: threads that are held up take fewer. Layer by layer: what was encoded together lies
        # together, and is read in one stream.
        share = max(1, min(runs, pieces // (4 * self._threads)))
        arrays = (starts, *where, *angles, *self._arrays)
        numbers = (
            0, 0, self._scratch.data_ptr(), self._scratch.shape[1], pieces, share, half, is_neox_style, self._run,
            *self._numbers,
        )  # fmt: skip
        call = np.asarray([*numbers, *(n for array in arrays for n in (array.ctypes.data, array.size))], np.uint64)
        on_all_threads(_compiled_share.address, call.ctypes.data, self._threads)


def _bits(tensor: torch.Tensor) -> Array:
    bits: Array = tensor.view(torch.uint16).numpy().reshape(-1)
    return bits


def _runs(blocks: Array, offsets: Array, longest: int) -> Array:
    """Where runs of tokens begin that follow each other in a block and fit a tile; and the end of the last."""
    broken = (np.diff(blocks) != 0) | (np.diff(offsets) != 1) | (offsets[1:] % longest == 0)
    return np.concatenate(([0], np.flatnonzero(broken) + 1, [len(blocks)])).astype(np.uint64)


@inline
def _widen(bits):  # type: ignore[no-untyped-def]
    return as_float(np.uint32(bits) << HALF_WORD)


@inline
def _narrow(number):  # type: ignore[no-untyped-def]
    """Rounded to nearest, ties to even."""
    bits = as_bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> HALF_WORD) & np.uint32(1))) >> HALF_WORD)


@inline
def _half_words(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.uint16)


@inline
def _floats(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.float32)


@inline
def _numbers(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.uint64)


def _share(address):  # type: ignore[no-untyped-def]
    """Take pieces of a call, as made by ``Injector``, until none is left; run by all threads at once."""
    call = numba.carray(address, (48,), np.uint64)
    thread = take(call, np.uint64(1), ONE)
    scratch, pieces, share = call[2] + thread * call[3], call[4], call[5]
    starts, rows, blocks, offsets = _numbers(call, 20), _numbers(call, 22), _numbers(call, 24), _numbers(call, 26)
    cos, sin, layers, caches = _floats(call, 28), _floats(call, 30), _numbers(call, 32), _numbers(call, 34)
    keys, values = _half_words(call, 36), _half_words(call, 38)
    key_token, key_channel = _numbers(call, 40), _numbers(call, 42)
    value_token, value_channel = _numbers(call, 44), _numbers(call, 46)
    first = take(call, ZERO, share)
    while first < pieces:
        _inject(
            first, min(first + share, pieces), scratch, starts, rows, blocks, offsets, cos, sin, call[6],
            call[7] != ZERO, call[8], call[9], call[10], call[11], layers, caches, call[12], call[13], keys, values,
            call[14], key_token, key_channel, call[15], call[16], call[17], value_token, value_channel, call[18],
            call[19],
        )  # fmt: skip
        first = take(call, ZERO, share)
    finish_streams()


@jit
def _inject(  # type: ignore[no-untyped-def]
    first, last, scratch, starts, rows, blocks, offsets, cos, sin, half, is_neox_style, run, num_rows, heads, size,
    layers, caches, total, block_size, keys, values, key_form, key_token, key_channel, key_head, key_chunk, value_form,
    value_token, value_channel, value_head, value_chunk,
):  # fmt: skip
    width = heads * size
    tile = numba.carray(pointer(scratch), (run * width,), np.uint16)
    words = numba.carray(pointer(scratch), (run * width // TWO,), np.uint32)
    lines = numba.carray(pointer(scratch + TWO * run * width), (LINE * run + run + size,), np.uint32)
    runs = np.uint64(starts.size) - ONE
    for number in range(first, last):
        index, run_number = number // runs, number % runs
        cache = numba.carray(pointer(caches[index]), (total,), np.uint16)
        cache_words = numba.carray(pointer(caches[index]), (total // TWO,), np.uint32)
        begin = starts[run_number]
        count = starts[run_number + ONE] - begin
        offset, block = offsets[begin], blocks[begin] * block_size
        layer = layers[index] * num_rows
        for k in range(count):
            _fetch_row(keys, layer, rows, begin + k + _AHEAD, width)
            source = (layer + rows[begin + k]) * width
            _turn(keys, source, tile, k * width, cos, sin, (begin + k) * half, half, is_neox_style, heads, size)
        put(tile, words, lines, count, offset, heads, size, cache, cache_words, block, key_form, key_token,
             key_channel, key_head, key_chunk)  # fmt: skip
        for k in range(count):
            _fetch_row(values, layer, rows, begin + k + _AHEAD, width)
            source = (layer + rows[begin + k]) * width
            for j in range(width):
                tile[k * width + j] = values[source + j]
        put(tile, words, lines, count, offset, heads, size, cache, cache_words, block, value_form, value_token,
             value_channel, value_head, value_chunk)  # fmt: skip


@inline
def _fetch_row(array, layer, rows, number, width):  # type: ignore[no-untyped-def]
    if number < np.uint64(rows.size):
        source = (layer + rows[number]) * width
        for j in range(ZERO, width, TWO * LINE):
            fetch(array, source + j)


@jit
def _turn(  # type: ignore[no-untyped-def]
    keys, source, tile, target, cos, sin, angle, half, is_neox_style, heads, size
):  # fmt: skip
    """One token's keys, rotated."""
    for head in range(heads):
        a, to = source + head * size, target + head * size
        if is_neox_style and half % LINE == ZERO:
            for d in range(ZERO, half, LINE):
                turn_line(keys, a + d, a + half + d, cos, sin, angle + d, tile, to + d, to + half + d)
        elif is_neox_style:
            for d in range(half):
                x, y, c, s = _widen(keys[a + d]), _widen(keys[a + half + d]), cos[angle + d], sin[angle + d]
                tile[to + d] = _narrow(x * c - y * s)
                tile[to + half + d] = _narrow(y * c + x * s)
        else:
            for d in range(half):
                x, y = _widen(keys[a + TWO * d]), _widen(keys[a + TWO * d + ONE])
                c, s = cos[angle + d], sin[angle + d]
                tile[to + TWO * d] = _narrow(x * c - y * s)
                tile[to + TWO * d + ONE] = _narrow(y * c + x * s)
        for d in range(TWO * half, size):
            tile[to + d] = keys[a + d]


_compiled_share: Any = jit(_share, partial(numba.cfunc, types.void(types.voidptr)))
