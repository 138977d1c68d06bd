"""Inject on a CPU, bfloat16: slab to paged cache in one pass, without a copy in between.

A run of tokens that share a block is rotated into a small tile that stays in the processor's first-level cache, and
from there written in the order in which the backend packs a block. Compiled by numba when first called.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from inferscale_mem.kernels.inject.layout import FORMS, BlockLayout

Array = np.ndarray[Any, Any]

# Unsigned numbers throughout: numba would test each signed index for being negative, and then nothing is vectorised.
_ONE, _TWO, _HALF_WORD = np.uint64(1), np.uint64(2), np.uint32(16)
_ROWS, _COLUMNS, _COLUMN_PAIRS, _TOKEN_PAIRS = range(4)
assert FORMS == ("rows", "columns", "column pairs", "token pairs")
_LONGEST_RUN = 32
"""Tokens; a tile of more would leave the first-level cache."""

_inline = numba.njit(nogil=True, boundscheck=False, error_model="numpy", inline="always")


def _jit(function: Any) -> Any:
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it: neither this folder nor the user's cache can be written
        return numba.njit(**options)(function)


class Injector:
    """Writes rows of a slab into the paged caches of some of its layers.

    Args:
        keys: before RoPE, bfloat16 [L, R, H, D], contiguous.
        values: likewise.
        layers: which of the L.
        caches: one per layer: contiguous bfloat16, a whole number of blocks.
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
        self._kept = tensors  # the addresses below are theirs
        self._keys, self._values = _bits(keys), _bits(values)
        self._shape = tuple(np.uint64(n) for n in keys.shape[1:])
        self._layers = np.asarray(layers, dtype=np.uint64)
        self._caches = np.asarray([cache.data_ptr() for cache in caches], dtype=np.uint64)
        self._sizes = np.asarray([caches[0].numel(), caches[0][0].numel()], dtype=np.uint64)
        self._run = int(np.gcd.reduce([key_layout.group, value_layout.group, _LONGEST_RUN]))
        self._layouts = (*_layout(key_layout), *_layout(value_layout))
        self._threads = threads
        self._helpers = _helpers(threads - 1) if threads > 1 else None

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
        angles = [part.numpy().reshape(-1) if half else np.zeros(1, np.float32) for part in (cos, sin)]

        def part(first: int, last: int) -> None:
            _inject(
                np.uint64(first), np.uint64(last), starts, *where, *angles, np.uint64(half), is_neox_style,
                np.uint64(self._run), *self._shape, self._layers, self._caches, self._sizes,
                self._keys, self._values, *self._layouts,
            )  # fmt: skip

        # Layer by layer: what was encoded together lies together, and is read in one stream.
        pieces = len(self._layers) * (len(starts) - 1)
        edges = np.linspace(0, pieces, self._threads + 1).astype(int)
        others = [self._helpers.submit(part, *edge) for edge in pairwise(edges[1:])] if self._helpers else []
        part(edges[0], edges[1])
        wait(others)
        for other in others:
            other.result()


@lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "inferscale-inject", _anywhere)


def _anywhere() -> None:
    """Let this thread run wherever any thread of the process may: it inherits one that is bound to a single core."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cores |= os.sched_getaffinity(int(thread))
    os.sched_setaffinity(0, cores)


def _bits(tensor: torch.Tensor) -> Array:
    bits: Array = tensor.view(torch.uint16).numpy().reshape(-1)
    return bits


def _layout(layout: BlockLayout) -> tuple[Any, ...]:
    form = FORMS.index(layout.form)
    return form, layout.token, layout.channel, np.uint64(layout.head_stride), np.uint64(layout.chunk)


def _runs(blocks: Array, offsets: Array, longest: int) -> Array:
    """Where runs of tokens begin that follow each other in a block and fit a tile; and the end of the last."""
    broken = (np.diff(blocks) != 0) | (np.diff(offsets) != 1) | (offsets[1:] % longest == 0)
    return np.concatenate(([0], np.flatnonzero(broken) + 1, [len(blocks)])).astype(np.uint64)


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(_: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(_: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any) -> Any:
    return types.voidptr(types.uint64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], ir.IntType(8).as_pointer()
    )


@_inline
def _widen(bits):  # type: ignore[no-untyped-def]
    return _as_float(np.uint32(bits) << _HALF_WORD)


@_inline
def _narrow(number):  # type: ignore[no-untyped-def]
    """Rounded to nearest, ties to even."""
    bits = _as_bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> _HALF_WORD) & np.uint32(1))) >> _HALF_WORD)


@_inline
def _word(low, high):  # type: ignore[no-untyped-def]
    return np.uint32(low) | (np.uint32(high) << _HALF_WORD)


@_jit
def _inject(  # type: ignore[no-untyped-def]
    first, last, starts, rows, blocks, offsets, cos, sin, half, is_neox_style, run, num_rows, heads, size, layers,
    caches, sizes, keys, values, key_form, key_token, key_channel, key_head, key_chunk, value_form, value_token,
    value_channel, value_head, value_chunk,
):  # fmt: skip
    width = heads * size
    tile = np.empty(run * width, np.uint16)
    words = tile.view(np.uint32)
    runs = np.uint64(starts.size) - _ONE
    for number in range(first, last):
        index, run_number = number // runs, number % runs
        cache = numba.carray(_pointer(caches[index]), (sizes[0],), np.uint16)
        cache_words = numba.carray(_pointer(caches[index]), (sizes[0] // _TWO,), np.uint32)
        begin = starts[run_number]
        count = starts[run_number + _ONE] - begin
        offset, block = offsets[begin], blocks[begin] * sizes[1]
        for k in range(count):
            source = (layers[index] * num_rows + rows[begin + k]) * width
            _turn(keys, source, tile, k * width, cos, sin, (begin + k) * half, half, is_neox_style, heads, size)
        _put(tile, words, count, offset, heads, size, cache, cache_words, block, key_form, key_token, key_channel,
             key_head, key_chunk)  # fmt: skip
        for k in range(count):
            source = (layers[index] * num_rows + rows[begin + k]) * width
            for j in range(width):
                tile[k * width + j] = values[source + j]
        _put(tile, words, count, offset, heads, size, cache, cache_words, block, value_form, value_token,
             value_channel, value_head, value_chunk)  # fmt: skip


@_jit
def _turn(  # type: ignore[no-untyped-def]
    keys, source, tile, target, cos, sin, angle, half, is_neox_style, heads, size
):  # fmt: skip
    """One token's keys, rotated."""
    for head in range(heads):
        a, to = source + head * size, target + head * size
        if is_neox_style:
            for d in range(half):
                x, y, c, s = _widen(keys[a + d]), _widen(keys[a + half + d]), cos[angle + d], sin[angle + d]
                tile[to + d] = _narrow(x * c - y * s)
                tile[to + half + d] = _narrow(y * c + x * s)
        else:
            for d in range(half):
                x, y = _widen(keys[a + _TWO * d]), _widen(keys[a + _TWO * d + _ONE])
                c, s = cos[angle + d], sin[angle + d]
                tile[to + _TWO * d] = _narrow(x * c - y * s)
                tile[to + _TWO * d + _ONE] = _narrow(y * c + x * s)
        for d in range(_TWO * half, size):
            tile[to + d] = keys[a + d]


@_jit
def _put(  # type: ignore[no-untyped-def]
    tile, words, count, offset, heads, size, cache, cache_words, block, form, token, channel, head_stride, chunk
):  # fmt: skip
    """A tile [count, heads, size] into a block, from its token ``offset`` on."""
    width = heads * size
    for head in range(heads):
        base, a = block + head * head_stride, head * size
        if form == _ROWS:
            for k in range(count):
                to = base + token[offset + k]
                for d in range(size):
                    cache[to + d] = tile[k * width + a + d]
        elif form == _COLUMNS:
            for d in range(size // _TWO):  # two at a time: processors gather words, not half words
                even = base + token[offset] + channel[_TWO * d]
                odd = base + token[offset] + channel[_TWO * d + _ONE]
                for k in range(count):
                    word = words[(k * width + a) // _TWO + d]
                    cache[even + k] = np.uint16(word)
                    cache[odd + k] = np.uint16(word >> _HALF_WORD)
        elif form == _COLUMN_PAIRS:
            for d in range(size // _TWO):
                to = (base + token[offset] + channel[_TWO * d]) // _TWO
                for k in range(count):
                    cache_words[to + k] = words[k * (width // _TWO) + a // _TWO + d]
        else:
            _put_token_pairs(tile, count, offset, width, a, size, cache, cache_words, base, token, channel, chunk)


@_jit
def _put_token_pairs(  # type: ignore[no-untyped-def]
    tile, count, offset, width, a, size, cache, cache_words, base, token, channel, chunk
):  # fmt: skip
    k = np.uint64(0)
    while k < count:
        to = base + token[offset + k]
        if (offset + k) % _TWO == np.uint64(0) and k + _ONE < count:
            for part in range(np.uint64(0), size, chunk):
                place, low = (to + channel[part]) // _TWO, k * width + a + part
                for d in range(chunk):
                    cache_words[place + d] = _word(tile[low + d], tile[low + width + d])
            k += _TWO
        else:
            for d in range(size):
                cache[to + channel[d]] = tile[k * width + a + d]
            k += _ONE
