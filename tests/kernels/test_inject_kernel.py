"""The CPU form of inject against the reference, bit for bit, in every layout of a block it knows."""

from __future__ import annotations

import itertools

import pytest
import torch

from inferscale_mem.kernels.inject.cpu import FORMS_OF, Injector
from inferscale_mem.kernels.inject.layout import BlockLayout, example, find_layout
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.quantise import Stored, quantise

BLOCK, HEADS, SIZE = 32, 3, 32
Segments = tuple[tuple[int, int], ...]


def places(form: str, of_values: bool = False, size: int = SIZE) -> torch.Tensor:
    """[BLOCK, HEADS, size]: where a backend that packs like this keeps each element."""
    return example(form, BLOCK, HEADS, size)[of_values]  # type: ignore[arg-type]


FORMS = ("rows", "columns", "column pairs", "token pairs")


def layout_of(form: str, of_values: bool = False, size: int = SIZE) -> BlockLayout:
    layout = find_layout(places(form, of_values, size))
    assert layout is not None and layout.form == form
    return layout


@pytest.mark.parametrize("form", FORMS)
def test_layouts_are_recognised(form: str) -> None:
    layout = layout_of(form, True)
    wanted = torch.from_numpy(layout.token.astype(int))[:, None, None]
    wanted = wanted + torch.arange(HEADS)[:, None] * layout.head_stride + torch.from_numpy(layout.channel.astype(int))
    assert torch.equal(wanted, places(form, True))


@pytest.mark.parametrize("size", [24, 32, 64])
@pytest.mark.parametrize("form", FORMS)
def test_examples_fill_a_block(form: str, size: int) -> None:
    every = torch.stack([places(form, of_values, size) for of_values in (False, True)]).flatten().sort().values
    assert torch.equal(every, torch.arange(2 * BLOCK * HEADS * size))


def test_other_orders_are_not() -> None:
    shuffled = torch.randperm(BLOCK * HEADS * SIZE, generator=torch.Generator().manual_seed(0))
    assert find_layout(shuffled.view(BLOCK, HEADS, SIZE)) is None
    by_twos = torch.arange(BLOCK * HEADS * SIZE).view(HEADS, BLOCK // 2, SIZE // 4, 2, 4)
    assert find_layout(by_twos.permute(1, 3, 0, 2, 4).reshape(BLOCK, HEADS, SIZE)) is None


def positions_of(*segments: tuple[int, int]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + count) for start, count in segments])


SEGMENTS = {
    "whole blocks": ((0, 96),),
    "an odd start and end": ((5, 70),),
    "one token": ((37, 1),),
    "two requests": ((3, 40), (64, 33)),
    "a hole": ((0, 31), (33, 2), (90, 6)),
    "nothing": (),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("half, is_neox_style", [(16, True), (16, False), (5, True), (5, False), (0, True)])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_as_the_reference(segments: Segments, half: int, is_neox_style: bool, threads: int) -> None:
    compare(segments, SIZE, half, is_neox_style, threads)


@pytest.mark.parametrize("size, half", [(24, 12), (24, 8), (64, 32), (64, 16), (80, 40), (128, 64)])
def test_other_head_sizes(size: int, half: int) -> None:
    for segments in SEGMENTS.values():
        compare(segments, size, half, is_neox_style=True, threads=2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("half, is_neox_style", [(16, True), (16, False), (5, True), (5, False), (0, True)])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_rows_in_8_bits(segments: Segments, half: int, is_neox_style: bool, threads: int) -> None:
    compare(segments, SIZE, half, is_neox_style, threads, bits=8)


@pytest.mark.parametrize("size, half", [(24, 12), (64, 32), (64, 16), (80, 40), (128, 64)])
def test_rows_in_8_bits_of_other_head_sizes(size: int, half: int) -> None:
    for segments in SEGMENTS.values():
        compare(segments, size, half, is_neox_style=True, threads=2, bits=8)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("half, is_neox_style", [(16, True), (16, False), (5, True), (5, False), (0, True)])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_float32(segments: Segments, half: int, is_neox_style: bool, bits: int | None) -> None:
    compare(segments, SIZE, half, is_neox_style, threads=2, bits=bits, dtype=torch.float32)


@pytest.mark.parametrize("size, half", [(24, 12), (24, 8), (64, 32), (64, 16), (80, 40), (128, 64)])
def test_float32_of_other_head_sizes(size: int, half: int) -> None:
    for segments in SEGMENTS.values():
        compare(segments, size, half, is_neox_style=True, threads=3, dtype=torch.float32)


def stored(numbers: torch.Tensor, bits: int | None, dtype: torch.dtype) -> Stored:
    """As a slab has them; with tiny and huge heads among them."""
    if bits is None:
        return numbers.to(dtype)
    factors = torch.tensor([1e-9, 1e-6, 1.0, 300.0, 1e7])
    return quantise(numbers * factors[torch.arange(numbers[..., 0].numel()).view(numbers.shape[:-1]) % 5, None], bits)


def compare(
    segments: Segments,
    size: int,
    half: int,
    is_neox_style: bool,
    threads: int,
    bits: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Bit for bit, every layout of keys with every layout of values; what is not written stays as it is."""
    generator = torch.Generator().manual_seed(half)
    layers, num_rows, num_blocks = 3, 200, 9
    keys, values = (
        stored(part, bits, dtype) for part in torch.randn(2, layers, num_rows, HEADS, size, generator=generator)
    )
    positions = positions_of(*segments) if segments else torch.zeros(0, dtype=torch.int64)
    rows = torch.randperm(num_rows, generator=generator)[: len(positions)]
    blocks = torch.randperm(num_blocks, generator=generator)[positions // BLOCK]
    angles = torch.randn(2, len(positions), half, generator=generator)
    for key_form, value_form in itertools.product(FORMS_OF[dtype], FORMS_OF[dtype]):
        key_places, value_places = places(key_form, False, size), places(value_form, True, size)
        chosen = [2, 0]
        shape = (len(chosen), num_blocks, 2 * BLOCK * HEADS * size)
        wanted, got = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        layouts = layout_of(key_form, False, size), layout_of(value_form, True, size)
        injector = Injector(keys, values, chosen, [*got], *layouts, threads)
        injector(rows, blocks, positions % BLOCK, *angles, is_neox_style)
        for layer, cache in zip(chosen, wanted, strict=True):
            inject(
                keys[layer], values[layer], rows, blocks, positions % BLOCK, *angles, is_neox_style, cache, key_places,
                value_places,
            )  # fmt: skip
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), (key_form, value_form)
