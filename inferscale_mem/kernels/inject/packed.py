"""Write tokens in the order in which a backend packs a block of its cache; see ``layout`` for the orders."""

from __future__ import annotations

import numpy as np

from inferscale_mem.kernels.compiling import HALF_WORD, ONE, TWO, ZERO, inline, jit
from inferscale_mem.kernels.inject.layout import FORMS
from inferscale_mem.kernels.instructions import LINE, interleave, stream_line, transpose

_ROWS, _COLUMNS, _COLUMN_PAIRS, _TOKEN_PAIRS = range(4)
assert FORMS == ("rows", "columns", "column pairs", "token pairs")


@jit
def put_words(  # type: ignore[no-untyped-def]
    words, lines, count, offset, heads, size, cache_words, block, form, token, channel, head_stride
):  # fmt: skip
    """A tile [count, heads, size] of words into a block, from its token ``offset`` on: rows, or columns."""
    width = heads * size
    for head in range(heads):
        base, a = block + head * head_stride, head * size
        if form == _ROWS:
            for k in range(count):
                _send(cache_words, base + token[offset + k], words, k * width + a, size)
        else:
            for first in range(ZERO, size, LINE):
                wide = min(LINE, size - first)
                _turn_over(words, a + first, width, count, lines, wide)
                for d in range(wide):
                    _send(cache_words, base + token[offset] + channel[first + d], lines, d * count, count)


@jit
def put_half_words(  # type: ignore[no-untyped-def]
    tile, words, lines, count, offset, heads, size, cache, cache_words, block, form, token, channel, head_stride, chunk
):  # fmt: skip
    """A tile [count, heads, size] of half words, likewise: all forms."""
    width = heads * size
    half_words = lines.view(np.uint16)
    for head in range(heads):
        base, a = block + head * head_stride, head * size
        if form == _ROWS:
            for k in range(count):
                _copy(tile, words, k * width + a, cache, cache_words, base + token[offset + k], size)
        elif form == _TOKEN_PAIRS:
            _put_token_pairs(
                tile, lines, count, offset, width, a, size, cache, cache_words, base, token, channel, chunk
            )
        else:
            for first in range(ZERO, size // TWO, LINE):
                pairs = min(LINE, size // TWO - first)
                _turn_over(words, a // TWO + first, width // TWO, count, lines, pairs)
                for d in range(pairs):
                    to = base + token[offset] + channel[TWO * (first + d)]
                    if form == _COLUMN_PAIRS:
                        _send(cache_words, to // TWO, lines, d * count, count)
                    else:
                        spare = TWO * LINE * count
                        for k in range(count):  # what was turned over are words: two columns
                            half_words[spare + k] = np.uint16(lines[d * count + k])
                            half_words[spare + count + k] = np.uint16(lines[d * count + k] >> HALF_WORD)
                        other = base + token[offset] + channel[TWO * (first + d) + ONE]
                        _copy(half_words, lines, spare, cache, cache_words, to, count)
                        _copy(half_words, lines, spare + count, cache, cache_words, other, count)


@inline
def _turn_over(words, start, stride, count, lines, pairs):  # type: ignore[no-untyped-def]
    """Rows [count, pairs] of words, ``stride`` apart, become [pairs, count]."""
    if count % LINE == ZERO and pairs == LINE:
        for k in range(ZERO, count, LINE):
            transpose(words, start + k * stride, stride, lines, k, count)
    else:
        for d in range(pairs):
            for k in range(count):
                lines[d * count + k] = words[start + k * stride + d]


@inline
def _copy(source, source_words, start, target, target_words, to, count):  # type: ignore[no-untyped-def]
    """Copy half words, as words where that is possible."""
    if start % TWO == ZERO and to % TWO == ZERO and count % TWO == ZERO:
        _send(target_words, to // TWO, source_words, start // TWO, count // TWO)
    else:
        for i in range(count):
            target[to + i] = source[start + i]


@jit
def _put_token_pairs(  # type: ignore[no-untyped-def]
    tile, lines, count, offset, width, a, size, cache, cache_words, base, token, channel, chunk
):  # fmt: skip
    k = ZERO
    while k < count:
        to = base + token[offset + k]
        if (offset + k) % TWO == ZERO and k + ONE < count:
            for part in range(ZERO, size, chunk):
                low = k * width + a + part
                if chunk % LINE == ZERO:
                    for d in range(ZERO, chunk, LINE):
                        interleave(tile, low + d, low + width + d, lines, d)
                else:
                    for d in range(chunk):
                        lines[d] = _word(tile[low + d], tile[low + width + d])
                _send(cache_words, (to + channel[part]) // TWO, lines, ZERO, chunk)
            k += TWO
        else:
            for d in range(size):
                cache[to + channel[d]] = tile[k * width + a + d]
            k += ONE


@inline
def _send(target, to, source, start, count):  # type: ignore[no-untyped-def]
    """Copy words; past the cache where they fill whole lines of it."""
    if to % LINE == ZERO and count % LINE == ZERO:
        for i in range(ZERO, count, LINE):
            stream_line(target, to + i, source, start + i)
    else:
        for i in range(count):
            target[to + i] = source[start + i]


@inline
def _word(low, high):  # type: ignore[no-untyped-def]
    return np.uint32(low) | (np.uint32(high) << HALF_WORD)
