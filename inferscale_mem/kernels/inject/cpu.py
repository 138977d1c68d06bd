"""Inject on a CPU, into bfloat16 or float32: slab to paged cache in one pass, without a copy in between.

A run of tokens that share a block is rotated into a small tile that stays in the processor's first-level cache, and
from there written in the order in which the backend packs a block. What is read is asked for some rows ahead, and whole
cache lines are written past the cache, which otherwise would first read what is about to be overwritten (what each
step gains: docs/decisions/0019). Compiled by numba when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import overload

from inferscale_mem.kernels.compiling import HALF_WORD, ONE, OPTIONS, TWO, ZERO, inline, jit
from inferscale_mem.kernels.inject.layout import FORMS, BlockLayout, Form
from inferscale_mem.kernels.inject.packed import put_half_words, put_words
from inferscale_mem.kernels.instructions import (
    LINE,
    as_bits,
    as_float,
    as_number,
    fetch,
    finish_streams,
    pointer,
    take,
    turn_line,
)
from inferscale_mem.kernels.openmp import on_all_threads
from inferscale_mem.kernels.quantise import Quantised, Stored

Array = np.ndarray[Any, Any]

_LONGEST_RUN = 32
"""Tokens; a tile of more would leave the first-level cache."""
_WORD = np.uint64(4)
CACHE_LINE = int(_WORD * LINE)
"""Bytes."""
_AHEAD = np.uint64(12)
"""Rows; so many before one is read, it is asked for."""
FORMS_OF: dict[torch.dtype, tuple[Form, ...]] = {torch.bfloat16: FORMS, torch.float32: ("rows", "columns")}
"""Data types of caches -> the forms that are known of them."""


class Injector:
    """Writes rows of a slab into the paged caches of some of its layers.

    Args:
        keys: before RoPE, [L, R, H, D], contiguous: in the caches' dtype, or int8 with a scale for each head of a row.
        values: likewise.
        layers: which of the L.
        caches: one per layer: contiguous, bfloat16 or float32, a whole number of blocks, from the start of a cache line
            on.
        key_layout, value_layout: of a block of theirs; in float32, "rows" or "columns".
        threads: to use, this one included.
    """

    def __init__(
        self,
        keys: Stored,
        values: Stored,
        layers: Sequence[int],
        caches: Sequence[torch.Tensor],
        key_layout: BlockLayout,
        value_layout: BlockLayout,
        threads: int = 1,
    ) -> None:
        dtype = caches[0].dtype
        stored = [_codes_and_scales(part, dtype) for part in (keys, values)]
        tensors = (*caches, *(tensor for pair in stored for tensor in pair))
        assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
        assert all(cache.dtype == dtype and cache.data_ptr() % CACHE_LINE == 0 for cache in caches)
        assert all(layout.form in FORMS_OF[dtype] for layout in (key_layout, value_layout))
        self._kept = tensors  # the addresses below are theirs
        self._run_on = _compiled(dtype, isinstance(keys, Quantised)).address
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
            self._layers, addresses, *(codes.reshape(-1).numpy() for codes, _ in stored),
            *(array for layout in layouts for array in (layout.token, layout.channel)),
            *(scale.reshape(-1).numpy() for _, scale in stored),
        )  # fmt: skip
        self._threads = threads
        # A tile, lines to send, and one token as numbers.
        words = self._run * heads * size * dtype.itemsize // 4 + (int(LINE) + 1) * self._run + size + heads * size
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
        on_all_threads(self._run_on, call.ctypes.data, self._threads)


def _codes_and_scales(stored: Stored, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel reads them: bits of bfloat16, or numbers, and nothing; or codes and bits of scales."""
    if isinstance(stored, torch.Tensor):
        assert stored.dtype == dtype
        return stored if dtype == torch.float32 else stored.view(torch.uint16), torch.empty(0, dtype=torch.uint16)
    assert (stored.bits, stored.rows, stored.channels) == (8, 1, stored.shape[-1])
    return stored.codes, stored.scale.view(torch.uint16)


def _runs(blocks: Array, offsets: Array, longest: int) -> Array:
    """Where runs of tokens begin that follow each other in a block and fit a tile; and the end of the last."""
    broken = (np.diff(blocks) != 0) | (np.diff(offsets) != 1) | (offsets[1:] % longest == 0)
    return np.concatenate(([0], np.flatnonzero(broken) + 1, [len(blocks)])).astype(np.uint64)


@inline
def _narrow(number):  # type: ignore[no-untyped-def]
    """Rounded to nearest, ties to even."""
    bits = as_bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> HALF_WORD) & np.uint32(1))) >> HALF_WORD)


def _store(tile: Any, at: Any, number: Any) -> None:
    """A number into a tile, rounded to what that holds."""


@overload(_store, jit_options=OPTIONS)
def _choose_store(tile, at, number):  # type: ignore[no-untyped-def]
    def as_it_is(tile, at, number):  # type: ignore[no-untyped-def]
        tile[at] = number

    def narrowed(tile, at, number):  # type: ignore[no-untyped-def]
        tile[at] = _narrow(number)

    return as_it_is if tile.dtype == types.float32 else narrowed


@inline
def _half_words(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.uint16)


@inline
def _floats(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.float32)


@inline
def _numbers(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.uint64)


@inline
def _codes(call, at):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(call[at]), (call[at + 1],), np.int8)


def _share_of_half_words(address):  # type: ignore[no-untyped-def]
    """Take pieces of a call, as made by ``Injector``, until none is left; run by all threads at once."""
    call = numba.carray(address, (52,), np.uint64)
    _share(call, _half_words(call, 36), None, _half_words(call, 38), None, np.uint16)


def _share_of_floats(address):  # type: ignore[no-untyped-def]
    """The same in float32."""
    call = numba.carray(address, (52,), np.uint64)
    _share(call, _floats(call, 36), None, _floats(call, 38), None, np.float32)


def _share_of_codes(address):  # type: ignore[no-untyped-def]
    """The same for rows in 8 bits."""
    call = numba.carray(address, (52,), np.uint64)
    _share(call, _codes(call, 36), _half_words(call, 48), _codes(call, 38), _half_words(call, 50), np.uint16)


def _share_of_codes_as_floats(address):  # type: ignore[no-untyped-def]
    """The same for rows in 8 bits and caches in float32."""
    call = numba.carray(address, (52,), np.uint64)
    _share(call, _codes(call, 36), _half_words(call, 48), _codes(call, 38), _half_words(call, 50), np.float32)


@jit
def _share(call, keys, key_scales, values, value_scales, element):  # type: ignore[no-untyped-def]
    thread = take(call, np.uint64(1), ONE)
    scratch, pieces, share = call[2] + thread * call[3], call[4], call[5]
    starts, rows, blocks, offsets = _numbers(call, 20), _numbers(call, 22), _numbers(call, 24), _numbers(call, 26)
    cos, sin, layers, caches = _floats(call, 28), _floats(call, 30), _numbers(call, 32), _numbers(call, 34)
    key_token, key_channel = _numbers(call, 40), _numbers(call, 42)
    value_token, value_channel = _numbers(call, 44), _numbers(call, 46)
    first = take(call, ZERO, share)
    while first < pieces:
        _inject(
            first, min(first + share, pieces), scratch, starts, rows, blocks, offsets, cos, sin, call[6],
            call[7] != ZERO, call[8], call[9], call[10], call[11], layers, caches, call[12], call[13], keys,
            key_scales, values, value_scales, call[14], key_token, key_channel, call[15], call[16], call[17],
            value_token, value_channel, call[18], call[19], element,
        )  # fmt: skip
        first = take(call, ZERO, share)
    finish_streams()


@jit
def _inject(  # type: ignore[no-untyped-def]
    first, last, scratch, starts, rows, blocks, offsets, cos, sin, half, is_neox_style, run, num_rows, heads, size,
    layers, caches, total, block_size, keys, key_scales, values, value_scales, key_form, key_token, key_channel,
    key_head, key_chunk, value_form, value_token, value_channel, value_head, value_chunk, element,
):  # fmt: skip
    width = heads * size
    tile = numba.carray(pointer(scratch), (run * width,), element)
    bytes_each = np.uint64(tile.itemsize)
    words = numba.carray(pointer(scratch), (run * width * bytes_each // _WORD,), np.uint32)
    room = LINE * run + run + size
    lines = numba.carray(pointer(scratch + bytes_each * run * width), (room,), np.uint32)
    plain = numba.carray(pointer(scratch + bytes_each * run * width + _WORD * room), (width,), np.float32)
    runs = np.uint64(starts.size) - ONE
    for number in range(first, last):
        index, run_number = number // runs, number % runs
        cache = numba.carray(pointer(caches[index]), (total,), element)
        cache_words = numba.carray(pointer(caches[index]), (total * bytes_each // _WORD,), np.uint32)
        begin = starts[run_number]
        count = starts[run_number + ONE] - begin
        offset, block = offsets[begin], blocks[begin] * block_size
        layer = layers[index] * num_rows
        for k in range(count):
            _fetch_row(keys, layer, rows, begin + k + _AHEAD, width)
            _take_keys(  # type: ignore[no-untyped-call]
                keys, key_scales, layer + rows[begin + k], plain, tile, k * width, cos, sin, (begin + k) * half, half,
                is_neox_style, heads, size,
            )  # fmt: skip
        _put(tile, words, lines, count, offset, heads, size, cache, cache_words, block, key_form, key_token,
              key_channel, key_head, key_chunk)  # fmt: skip
        for k in range(count):
            _fetch_row(values, layer, rows, begin + k + _AHEAD, width)
            _take_values(  # type: ignore[no-untyped-call]
                values, value_scales, layer + rows[begin + k], plain, tile, k * width, heads, size
            )
        _put(tile, words, lines, count, offset, heads, size, cache, cache_words, block, value_form, value_token,
             value_channel, value_head, value_chunk)  # fmt: skip


@inline
def _fetch_row(array, layer, rows, number, width):  # type: ignore[no-untyped-def]
    if number < np.uint64(rows.size):
        source = (layer + rows[number]) * width
        for j in range(ZERO, width, _WORD * LINE // np.uint64(array.itemsize)):
            fetch(array, source + j)


def _take_keys(  # type: ignore[no-untyped-def]
    keys, scales, row, plain, tile, to, cos, sin, angle, half, is_neox_style, heads, size
):  # fmt: skip
    """One token's keys, rotated, into a tile."""


@overload(_take_keys, jit_options=OPTIONS)
def _choose_keys(  # type: ignore[no-untyped-def]
    keys, scales, row, plain, tile, to, cos, sin, angle, half, is_neox_style, heads, size
):  # fmt: skip
    def floats(  # type: ignore[no-untyped-def]
        keys, scales, row, plain, tile, to, cos, sin, angle, half, is_neox_style, heads, size
    ):  # fmt: skip
        _turn(keys, row * heads * size, tile, to, cos, sin, angle, half, is_neox_style, heads, size)

    def codes(  # type: ignore[no-untyped-def]
        keys, scales, row, plain, tile, to, cos, sin, angle, half, is_neox_style, heads, size
    ):  # fmt: skip
        _dequantise(keys, scales, row, heads, size, plain)
        _turn(plain, ZERO, tile, to, cos, sin, angle, half, is_neox_style, heads, size)

    return floats if isinstance(scales, types.NoneType) else codes


def _take_values(values, scales, row, plain, tile, to, heads, size):  # type: ignore[no-untyped-def]
    """One token's values into a tile."""


@overload(_take_values, jit_options=OPTIONS)
def _choose_values(values, scales, row, plain, tile, to, heads, size):  # type: ignore[no-untyped-def]
    def floats(values, scales, row, plain, tile, to, heads, size):  # type: ignore[no-untyped-def]
        for j in range(heads * size):
            tile[to + j] = values[row * heads * size + j]

    def codes(values, scales, row, plain, tile, to, heads, size):  # type: ignore[no-untyped-def]
        _dequantise(values, scales, row, heads, size, plain)
        for j in range(heads * size):
            _store(tile, to + j, plain[j])

    return floats if isinstance(scales, types.NoneType) else codes


@inline
def _dequantise(codes, scales, row, heads, size, plain):  # type: ignore[no-untyped-def]
    """One token as numbers; a product of a code and a scale is exact."""
    for head in range(heads):
        # A float16 without a sign: its bits, moved up, are a float32 that is smaller by this power of two.
        scale = as_float(np.uint32(scales[row * heads + head]) << np.uint32(13)) * np.float32(2.0**112)
        at, to = (row * heads + head) * size, head * size
        for d in range(size):
            plain[to + d] = np.float32(codes[at + d]) * scale


def _put(
    tile: Any, words: Any, lines: Any, count: Any, offset: Any, heads: Any, size: Any, cache: Any, cache_words: Any,
    block: Any, form: Any, token: Any, channel: Any, head_stride: Any, chunk: Any,
) -> None:  # fmt: skip
    """A tile into a block; see ``packed``."""


@overload(_put, jit_options=OPTIONS)
def _choose_put(  # type: ignore[no-untyped-def]
    tile, words, lines, count, offset, heads, size, cache, cache_words, block, form, token, channel, head_stride, chunk
):  # fmt: skip
    def of_words(  # type: ignore[no-untyped-def]
        tile, words, lines, count, offset, heads, size, cache, cache_words, block, form, token, channel, head_stride,
        chunk,
    ):  # fmt: skip
        put_words(words, lines, count, offset, heads, size, cache_words, block, form, token, channel, head_stride)

    def of_half_words(  # type: ignore[no-untyped-def]
        tile, words, lines, count, offset, heads, size, cache, cache_words, block, form, token, channel, head_stride,
        chunk,
    ):  # fmt: skip
        put_half_words(
            tile, words, lines, count, offset, heads, size, cache, cache_words, block, form, token, channel,
            head_stride, chunk,
        )  # fmt: skip

    return of_words if tile.dtype == types.float32 else of_half_words


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
                x, y, c, s = as_number(keys[a + d]), as_number(keys[a + half + d]), cos[angle + d], sin[angle + d]
                _store(tile, to + d, x * c - y * s)
                _store(tile, to + half + d, y * c + x * s)
        else:
            for d in range(half):
                x, y = as_number(keys[a + TWO * d]), as_number(keys[a + TWO * d + ONE])
                c, s = cos[angle + d], sin[angle + d]
                _store(tile, to + TWO * d, x * c - y * s)
                _store(tile, to + TWO * d + ONE, y * c + x * s)
        for d in range(TWO * half, size):
            _store(tile, to + d, as_number(keys[a + d]))


_SHARES = {
    (torch.bfloat16, False): _share_of_half_words,
    (torch.bfloat16, True): _share_of_codes,
    (torch.float32, False): _share_of_floats,
    (torch.float32, True): _share_of_codes_as_floats,
}


@lru_cache
def _compiled(dtype: torch.dtype, codes: bool) -> Any:
    """What a thread runs, with its address."""
    return jit(_SHARES[dtype, codes], partial(numba.cfunc, types.void(types.voidptr)))
