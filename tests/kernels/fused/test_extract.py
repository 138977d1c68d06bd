"""The Triton form of extract against the reference, and against inject: what went in comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_problems import DEVICE, NULL_BLOCK, POSITIONS, Case, Form, Where, caches_of, distance, places_of, store

from inferscale_mem.kernels.extract.fused import Extractor
from inferscale_mem.kernels.extract.reference import extract
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.paged import PagedCaches
from inferscale_mem.kernels.quantise import Quantised, Stored
from inferscale_mem.kernels.rope.reference import inverse

LAYERS, ROWS = 3, 50


def poisoned(case: Case, form: Form | None) -> Stored:
    """Room for records [LAYERS, ROWS, heads, size] in which nothing is yet."""
    shape = (LAYERS, ROWS, case.heads, case.size)
    if form is None:
        return torch.full(shape, float("nan"), dtype=case.stored, device=DEVICE)
    made = store(torch.zeros(shape, device=DEVICE), form)
    assert isinstance(made, Quantised)
    for part in (made.scale, made.zero):
        if part is not None:
            part.fill_(float("nan"))
    made.codes.fill_(77)
    return made


def parts(stored: Stored) -> list[torch.Tensor]:
    if isinstance(stored, torch.Tensor):
        return [stored]
    return [part for part in (stored.codes, stored.scale, stored.zero) if part is not None]


def copied(stored: Stored) -> Stored:
    if isinstance(stored, torch.Tensor):
        return stored.clone()
    zero = None if stored.zero is None else stored.zero.clone()
    return replace(stored, codes=stored.codes.clone(), scale=stored.scale.clone(), zero=zero)


def compare(case: Case) -> None:
    generator = torch.Generator().manual_seed(len(repr(case)))
    where = Where(case, ROWS, generator)
    chosen = [2, 0]
    memory, key_views, value_views = caches_of(case, len(chosen), where.num_blocks)
    memory.copy_(torch.randn(memory.shape, generator=generator) + torch.linspace(-2, 2, memory.shape[-1]))
    table = torch.randn(POSITIONS, case.rotary, generator=generator).to(case.table).to(DEVICE)
    got = poisoned(case, case.formats[0]), poisoned(case, case.formats[1])
    wanted = copied(got[0]), copied(got[1])

    undo = torch.cat(inverse(*table[where.all_positions].float().chunk(2, dim=1)), dim=1)
    Extractor(*got, chosen, PagedCaches(key_views, value_views))(where.step, undo, case.neox, NULL_BLOCK)
    cos, sin = table[where.positions].float().chunk(2, dim=1)
    for n, layer in enumerate(chosen):
        extract(
            wanted[0][layer], wanted[1][layer], *where.places, cos, sin, case.neox, memory[n],
            places_of(key_views[0], memory), places_of(value_views[0], memory),
        )  # fmt: skip
    interpreted = DEVICE.type == "cpu" and case.stored == torch.bfloat16  # which the interpreter truncates to
    for found, right in zip(got, wanted, strict=True):
        for mine, reference in zip(parts(found), parts(right), strict=True):
            if mine.dtype.is_floating_point:
                assert distance(mine, reference) <= (1 if interpreted else 0)
            else:
                assert torch.equal(mine, reference)
    if len(where.positions):
        assert not parts(got[0])[0].float().isnan().all()


@pytest.mark.parametrize("order", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strides_styles_and_types(order: str, neox: bool, dtype: torch.dtype) -> None:
    compare(Case(order=order, neox=neox, dtype=dtype, stored=dtype))


@pytest.mark.parametrize("heads, size, rotary", [(1, 8, 8), (3, 20, 12), (5, 36, 36), (1, 80, 32), (2, 96, 0)])
@pytest.mark.parametrize("neox", [True, False])
def test_odd_heads(heads: int, size: int, rotary: int, neox: bool) -> None:
    floats = {"dtype": torch.float32, "stored": torch.float32}
    compare(Case(heads=heads, size=size, rotary=rotary, neox=neox, block_size=3, **floats))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("forms", [((8, 1, 24), (4, 1, 4)), ((4, 1, 24), (8, 1, 8)), ((4, 1, 2), None)])
def test_quantised_on_the_way(forms: tuple[Form | None, Form | None], dtype: torch.dtype, neox: bool) -> None:
    """Codes, scales and zeros, bit for bit."""
    compare(Case(size=24, rotary=20, neox=neox, dtype=dtype, stored=torch.float32, formats=forms))


def test_zeros_and_huge_numbers_are_quantised_as_by_the_reference() -> None:
    case = Case(heads=1, size=8, rotary=0, dtype=torch.float32, stored=torch.float32, formats=((8, 1, 8), (4, 1, 8)))
    for number in (0.0, 1e-9, 3e5, -3e5, 65504.0 * 127):
        made = [poisoned(case, form) for form in case.formats]
        where = Where(case, ROWS, torch.Generator().manual_seed(0))
        memory, keys, values = caches_of(case, 1, where.num_blocks)
        memory.fill_(number)
        Extractor(*made, [0], PagedCaches(keys, values))(where.step, torch.empty(99, 0, device=DEVICE), True)
        for mine, form in zip(made, case.formats, strict=True):
            right = store(torch.full((1, 1, 1, 8), number, device=DEVICE), form)
            rows = where.step.numbers[: where.step.num_tokens].long()
            for ours, theirs in zip(parts(mine), parts(right), strict=True):
                assert torch.equal(ours[0, rows], theirs[0].expand_as(ours[0, rows]))


@pytest.mark.parametrize("neox", [True, False])
def test_undoes_inject(neox: bool) -> None:
    """Also where a table's lengths are far from one, as with YaRN."""
    case = Case(neox=neox, dtype=torch.float32, stored=torch.float32)
    generator = torch.Generator().manual_seed(1)
    where = Where(case, ROWS, generator)
    memory, keys, values = caches_of(case, 1, where.num_blocks)
    stored = torch.randn(2, ROWS, case.heads, case.size, generator=generator).to(DEVICE)
    angle = 6.3 * torch.rand(len(where.positions), case.rotary // 2, generator=generator).to(DEVICE)
    cos, sin = 1.37 * angle.cos(), 1.37 * angle.sin()
    places = places_of(keys[0], memory), places_of(values[0], memory)
    inject(stored[0], stored[1], *where.places, cos, sin, neox, memory[0], *places)
    back = [poisoned(case, None) for _ in range(2)]
    undo = torch.zeros(where.step.num_tokens, case.rotary, device=DEVICE)
    undo[where.kept] = torch.cat(inverse(cos, sin), dim=1)
    Extractor(*back, [1], PagedCaches(keys, values))(where.step, undo, neox, NULL_BLOCK)
    rows = where.places[0]
    torch.testing.assert_close(back[0][1, rows], stored[0, rows], rtol=1e-6, atol=1e-6)
    assert torch.equal(back[1][1, rows], stored[1, rows])


def test_scales_for_several_rows_are_refused() -> None:
    case = Case()
    _, keys, values = caches_of(case, 1, 2)
    with pytest.raises(ValueError, match="on the way"):
        Extractor(poisoned(case, (4, 16, 1)), poisoned(case, None), [0], PagedCaches(keys, values))
