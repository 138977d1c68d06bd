"""The Triton form of inject against the reference: odd shapes, every format and stride, poisoned caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from inferscale_mem.kernels.inject.fused import Injector
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.paged import PagedCaches, Step
from inferscale_mem.kernels.quantise import Stored, quantise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS, NULL_BLOCK = 90, 0


@dataclass(frozen=True)
class Case:
    """One problem; ``requests``: per request its segments (position, tokens), ``formats`` of keys and of values."""

    requests: tuple[tuple[tuple[int, int], ...], ...] = (((0, 5), (5, 9)), ((3, 1),))
    heads: int = 2
    size: int = 16
    rotary: int = 16
    neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype = torch.bfloat16
    order: str = "NHD"
    block_size: int = 4
    formats: tuple[tuple[int, int, int] | None, tuple[int, int, int] | None] = (None, None)
    table: torch.dtype = torch.float32


def caches_of(case: Case, layers: int, blocks: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Poisoned memory [layers, blocks, elements], and its views [blocks, block_size, H, D] of keys and of values."""
    n, h, d = case.block_size, case.heads, case.size
    memory = torch.full((layers, blocks, 2 * n * h * d), float("nan"), dtype=case.dtype, device=DEVICE)
    if case.order == "NHD":  # vLLM 0.32: keys beside values
        views = memory.view(layers, blocks, n, h, 2, d).unbind(4)
    elif case.order == "HND":
        views = memory.view(layers, blocks, h, n, 2, d).transpose(2, 3).unbind(4)
    else:
        assert case.order == "apart"
        views = memory.view(layers, blocks, 2, n, h, d).unbind(2)
    return memory, *([*view] for view in views)


def places_of(view: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """[block_size, H, D]: the place of each element in a block."""
    first = view.storage_offset() - memory.storage_offset()
    numbers = torch.arange(memory[0].numel(), device=DEVICE)
    return torch.as_strided(numbers, view.shape[1:], view.stride()[1:], first % memory.stride(0))


def store(floats: torch.Tensor, form: tuple[int, int, int] | None) -> Stored:
    return floats if form is None else quantise(floats, form[0], rows=form[1], channels=form[2])


def distance(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many representable numbers apart, at most; both must be poisoned in the same places."""
    assert torch.equal(got.isnan(), wanted.isnan())
    if got.dtype == torch.float32:
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
        return 0
    steps = [x.nan_to_num(0.0).view(torch.int16).int() for x in (got, wanted)]
    ordered = [torch.where(x < 0, -32768 - x, x) for x in steps]
    return int((ordered[0] - ordered[1]).abs().max())


def compare(case: Case) -> None:
    generator = torch.Generator().manual_seed(len(repr(case)))
    layers, num_rows = 3, 50
    keys, values = (
        torch.randn(2, layers, num_rows, case.heads, case.size, generator=generator).to(case.stored).to(DEVICE)
    )
    stored_keys, stored_values = store(keys, case.formats[0]), store(values, case.formats[1])
    table = torch.randn(POSITIONS, case.rotary, generator=generator).to(case.table).to(DEVICE)

    position_lists = [
        np.concatenate([np.arange(s, s + n) for s, n in parts] or [np.zeros(0, int)]) for parts in case.requests
    ]
    width = -(-POSITIONS // case.block_size)
    order = torch.randperm(1 + width * len(case.requests), generator=generator).numpy()
    tables = order[: width * len(case.requests)].reshape(len(case.requests), width)
    num_blocks = len(order)
    positions = np.concatenate(position_lists)
    request = np.repeat(np.arange(len(case.requests)), [len(p) for p in position_lists])
    rows = torch.randperm(num_rows, generator=generator).numpy()[: len(positions)]
    step = Step(rows, positions, request * width, tables.reshape(-1), DEVICE)

    chosen = [2, 0]
    memory, key_views, value_views = caches_of(case, len(chosen), num_blocks)
    wanted = memory.clone()
    Injector(stored_keys, stored_values, chosen, PagedCaches(key_views, value_views))(
        step, table, case.neox, NULL_BLOCK
    )

    blocks = tables[request, positions // case.block_size]
    kept = blocks != NULL_BLOCK
    where = [torch.from_numpy(n[kept].astype(np.int64)).to(DEVICE) for n in (rows, blocks, positions % case.block_size)]
    cos, sin = table[torch.from_numpy(positions[kept]).to(DEVICE)].float().chunk(2, dim=1)
    for n, layer in enumerate(chosen):
        inject(
            stored_keys[layer], stored_values[layer], *where, cos, sin, case.neox, wanted[n],
            places_of(key_views[0], memory), places_of(value_views[0], memory),
        )  # fmt: skip
    if kept.any():
        assert not wanted.isnan().all()
    # The interpreter truncates to bfloat16 where a GPU rounds; elsewhere the two forms agree bit for bit.
    interpreted = DEVICE.type == "cpu" and case.dtype == torch.bfloat16
    assert distance(memory, wanted) <= (1 if interpreted else 0)


@pytest.mark.parametrize("order", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strides_styles_and_types(order: str, neox: bool, dtype: torch.dtype) -> None:
    compare(Case(order=order, neox=neox, dtype=dtype, stored=dtype))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    "heads, size, rotary", [(1, 8, 8), (3, 20, 12), (3, 24, 10), (5, 36, 36), (1, 80, 32), (2, 96, 0)]
)
def test_odd_heads(heads: int, size: int, rotary: int, neox: bool) -> None:
    compare(
        Case(heads=heads, size=size, rotary=rotary, neox=neox, dtype=torch.float32, stored=torch.float32, block_size=3)
    )


FORMATS = {
    "int8": (8, 1, 24), "int8 in parts": (8, 1, 8), "int8 per channel": (8, 16, 1),
    "int4": (4, 1, 24), "int4 in parts": (4, 1, 4), "int4 per channel": (4, 16, 1), "floats": None,
}  # fmt: skip


@pytest.mark.parametrize("value_form", ["int8", "int4 in parts", "floats"])
@pytest.mark.parametrize("key_form", FORMATS)
def test_fewer_bits(key_form: str, value_form: str) -> None:
    """Bit for bit in float32: what is dequantised is exact."""
    case = {"size": 24, "rotary": 16, "dtype": torch.float32, "stored": torch.float32}
    compare(Case(formats=(FORMATS[key_form], FORMATS[value_form]), neox=key_form != "int4", **case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_bits_into_narrow_caches(dtype: torch.dtype) -> None:
    compare(Case(size=24, rotary=24, dtype=dtype, formats=((4, 16, 1), (4, 1, 8)), order="HND", table=dtype))


@pytest.mark.parametrize(
    "requests",
    [((),), (((89, 1),),), (((0, 17),), ((1, 16),), ((7, 2), (30, 4))), (((0, 3), (40, 2), (85, 5)), ())],
    ids=["nothing", "the last position", "three requests", "holes"],
)
@pytest.mark.parametrize("block_size", [16, 5])
def test_segments(requests: tuple[tuple[tuple[int, int], ...], ...], block_size: int) -> None:
    compare(Case(requests=requests, block_size=block_size, heads=3, size=8, rotary=8, dtype=torch.float16))


def test_caches_that_differ_are_refused() -> None:
    views = torch.zeros(2, 4, 3, 2, 8)
    with pytest.raises(ValueError, match="one shape"):
        PagedCaches([views[0]], [views[1].half()])
    with pytest.raises(ValueError, match="follow each other"):
        PagedCaches([views[0].transpose(2, 3)], [views[1].transpose(2, 3)])
