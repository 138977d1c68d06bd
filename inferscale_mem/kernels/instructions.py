"""What numba has no words for: instructions of processors, given as LLVM builds them.

Places are elements of arrays, given as an array and an index. Nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LINE = np.uint64(16)
"""32-bit words in a cache line."""


@intrinsic  # type: ignore[untyped-decorator]
def as_float(_: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic  # type: ignore[untyped-decorator]
def as_bits(_: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@intrinsic  # type: ignore[untyped-decorator]
def as_number(_: Any, stored: Any) -> Any:
    """The value of a bfloat16, given as its bits; a float32 is its own."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widened(builder, args[0], 1) if stored == types.uint16 else args[0]

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_: Any, address: Any) -> Any:
    return types.voidptr(types.uint64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], ir.IntType(8).as_pointer()
    )


@intrinsic  # type: ignore[untyped-decorator]
def fetch(_: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of an element that is read soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.bitcast(_element(context, builder, array, *args), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(prefetch, [place, *(ir.Constant(word, flag) for flag in (0, 3, 1))])  # read, keep, data
        return context.get_dummy_value()

    return types.none(array, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream_line(_: Any, target: Any, to: Any, source: Any, start: Any) -> Any:
    """Copy a line of words past the cache; ``target[to]`` begins a cache line."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(32), int(LINE)).as_pointer()
        into = builder.bitcast(_element(context, builder, target, *args[:2]), line)
        out_of = builder.bitcast(_element(context, builder, source, *args[2:]), line)
        store = builder.store(builder.load(out_of, align=4), into, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.none(target, types.uint64, source, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def turn_line(_: Any, keys: Any, x: Any, y: Any, cos: Any, sin: Any, angle: Any, tile: Any, to: Any, to_y: Any) -> Any:
    """16 pairs of ``keys``, as ``as_number`` takes them, from x and y on, rotated by the angles from ``angle`` on;
    into a tile of float32, or of bits of bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        side = int(LINE)
        halves, words = (ir.VectorType(ir.IntType(bits), side) for bits in (16, 32))
        floats = ir.VectorType(ir.FloatType(), side)

        def place(array: int, index: int, kind: Any) -> Any:
            element = _element(context, builder, signature.args[array], args[array], args[index])
            return builder.bitcast(element, kind.as_pointer())

        def filled(number: int) -> Any:
            return ir.Constant(words, [number] * side)

        def number(index: int) -> Any:
            if signature.args[0].dtype == types.float32:
                return builder.load(place(0, index, floats), align=4)
            return _widened(builder, builder.load(place(0, index, halves), align=2), side)

        def store(turned: Any, index: int) -> None:
            if signature.args[6].dtype == types.float32:
                builder.store(turned, place(6, index, floats), align=4)
                return
            bits = builder.bitcast(turned, words)
            odd = builder.and_(builder.lshr(bits, filled(16)), filled(1))
            rounded = builder.lshr(builder.add(builder.add(bits, filled(0x7FFF)), odd), filled(16))
            builder.store(builder.trunc(rounded, halves), place(6, index, halves), align=2)

        a, b = number(1), number(2)
        c, s = (builder.load(place(array, 5, floats), align=4) for array in (3, 4))
        store(builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), 7)
        store(builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), 8)
        return context.get_dummy_value()

    n = types.uint64
    return types.none(keys, n, n, cos, sin, n, tile, n, n), generate


@intrinsic  # type: ignore[untyped-decorator]
def transpose(_: Any, words: Any, start: Any, stride: Any, lines: Any, to: Any, step: Any) -> Any:
    """16 x 16 words: row i is read at ``start + i * stride``, column i written at ``to + i * step``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        side, half_lane = int(LINE), ir.IntType(32)
        line = ir.VectorType(half_lane, side)

        def place(array: int, first: int, by: int, number: int) -> Any:
            index = builder.add(args[first], builder.mul(args[by], ir.Constant(ir.IntType(64), number)))
            element = _element(context, builder, signature.args[array], args[array], index)
            return builder.bitcast(element, line.as_pointer())

        rows = [builder.load(place(0, 1, 2, number), align=4) for number in range(side)]
        for bit in (1, 2, 4, 8):  # swap the off-diagonal halves of squares of twice that size
            upper = [j + side - bit if j & bit else j for j in range(side)]
            lower = [j + side if j & bit else j + bit for j in range(side)]
            for i in (i for i in range(side) if not i & bit):
                pair = rows[i], rows[i | bit]
                for number, chosen in ((i, upper), (i | bit, lower)):
                    mask = ir.Constant(ir.VectorType(half_lane, side), chosen)
                    rows[number] = builder.shuffle_vector(*pair, mask)
        for number in range(side):
            builder.store(rows[number], place(3, 4, 5, number), align=4)
        return context.get_dummy_value()

    number = types.uint64
    return types.none(words, number, number, lines, number, number), generate


@intrinsic  # type: ignore[untyped-decorator]
def interleave(_: Any, tile: Any, first: Any, second: Any, lines: Any, to: Any) -> Any:
    """16 words whose low halves come from one place of a tile, and high halves from another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        side = int(LINE)
        halves, line = (ir.VectorType(ir.IntType(bits), side) for bits in (16, 32))

        def load(index: Any) -> Any:
            place = builder.bitcast(_element(context, builder, tile, args[0], index), halves.as_pointer())
            return builder.zext(builder.load(place, align=2), line)

        high = builder.shl(load(args[2]), ir.Constant(line, [16] * side))
        place = builder.bitcast(_element(context, builder, lines, *args[3:]), line.as_pointer())
        builder.store(builder.or_(load(args[1]), high), place, align=4)
        return context.get_dummy_value()

    return types.none(tile, types.uint64, types.uint64, lines, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def finish_streams(_: Any) -> Any:
    """What was written past the cache is seen by other threads before what this one writes next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(_: Any, array: Any, index: Any, count: Any) -> Any:
    """Add to an element; returns what it was. Atomic."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _element(context, builder, array, *args[:2]), args[2], "seq_cst")

    return types.uint64(array, types.uint64, types.uint64), generate


def _widened(builder: Any, bits: Any, side: int) -> Any:
    """bfloat16 as float32: bits move up."""
    word, number = ir.IntType(32), ir.FloatType()
    sixteen = ir.Constant(word, 16)
    if side > 1:
        word, number = ir.VectorType(word, side), ir.VectorType(number, side)
        sixteen = ir.Constant(word, [16] * side)
    return builder.bitcast(builder.shl(builder.zext(bits, word), sixteen), number)


def _element(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array)(context, builder, value).data, [index])
