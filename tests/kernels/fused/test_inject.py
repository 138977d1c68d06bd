"""The Triton form of inject against the reference: odd shapes, every format and stride, poisoned caches."""

from __future__ import annotations

import pytest
import torch
from paged_problems import DEVICE, NULL_BLOCK, POSITIONS, Case, Where, caches_of, distance, places_of, store

from inferscale_mem.kernels.inject.fused import Injector
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.paged import PagedCaches


def compare(case: Case) -> None:
    generator = torch.Generator().manual_seed(len(repr(case)))
    layers, num_rows = 3, 50
    keys, values = (
        torch.randn(2, layers, num_rows, case.heads, case.size, generator=generator).to(case.stored).to(DEVICE)
    )
    stored_keys, stored_values = store(keys, case.formats[0]), store(values, case.formats[1])
    table = torch.randn(POSITIONS, case.rotary, generator=generator).to(case.table).to(DEVICE)

    where = Where(case, num_rows, generator)
    chosen = [2, 0]
    memory, key_views, value_views = caches_of(case, len(chosen), where.num_blocks)
    wanted = memory.clone()
    Injector(stored_keys, stored_values, chosen, PagedCaches(key_views, value_views))(
        where.step, table, case.neox, NULL_BLOCK
    )

    cos, sin = table[where.positions].float().chunk(2, dim=1)
    for n, layer in enumerate(chosen):
        inject(
            stored_keys[layer], stored_values[layer], *where.places, cos, sin, case.neox, wanted[n],
            places_of(key_views[0], memory), places_of(value_views[0], memory),
        )  # fmt: skip
    if len(where.positions):
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
