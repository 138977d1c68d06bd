"""The connector's GPU writer leaves the same bits in a GPU backend's cache as that backend's own write; its GPU reader
keeps what the one for any packing keeps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="the connector needs vLLM")

from inferscale_mem.config import RECORD_DTYPES
from inferscale_mem.kernels.quantise import parts
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.metadata import Rows
from inferscale_mem.kv.connector.reading import PackingReader, make_fused_reader
from inferscale_mem.kv.connector.tokens import StepTokens
from inferscale_mem.kv.connector.writing import make_fused
from inferscale_mem.kv.packing import Packing, learn_packing
from inferscale_mem.kv.rope import RopeTable, rotate
from inferscale_mem.kv.slab import Slab

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, BLOCKS, HEADS, SIZE, BLOCK = 3, 7, 2, 16, 16


class Attention:
    """vLLM's attention layer as its GPU backends keep a cache: [blocks, heads, tokens, keys beside values]."""

    def __init__(self, order: str) -> None:
        self.impl = self
        shape = (BLOCKS, HEADS, BLOCK, 2 * SIZE) if order == "HND" else (BLOCKS, BLOCK, HEADS, 2 * SIZE)
        memory = torch.zeros(shape, device=DEVICE)
        self.kv_cache = memory if order == "HND" else memory.transpose(1, 2)

    @staticmethod
    def do_kv_cache_update(
        _: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK] = torch.cat((keys, values), dim=-1)


def layers_of(order: str, rope: RopeTable | None) -> list[CachedLayer]:
    modules = [Attention(order) for _ in range(LAYERS)]

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        Attention.do_kv_cache_update(None, keys, values, cache, slots)

    packing = learn_packing(write, modules[0].kv_cache[:2].clone(), SIZE)
    return [CachedLayer(str(n), m, 0, BLOCK, HEADS, SIZE, rope, packing) for n, m in enumerate(modules)]


def a_rope() -> RopeTable:
    angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(SIZE // 2)).to(DEVICE)
    return RopeTable(angles.cos(), angles.sin(), True, torch.float32)


@pytest.mark.parametrize("record_dtype", RECORD_DTYPES)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("roped", [True, False])
def test_writes_what_the_backend_writes(order: str, roped: bool, record_dtype: str) -> None:
    rope = a_rope() if roped else None
    layers = layers_of(order, rope)
    slab = Slab(LAYERS, 6, HEADS, SIZE, torch.float32, DEVICE, record_dtype)
    chosen = [2, 0]
    writer = make_fused(chosen, [layers[n] for n in chosen], slab)
    assert writer is not None
    for layer in layers:  # tuning left nothing behind
        assert not layer.module.kv_cache.count_nonzero()
        layer.module.kv_cache.fill_(float("nan"))
    generator = torch.Generator().manual_seed(0)
    for index in range(LAYERS):
        numbers = torch.randn(2, *slab.shape[1:], generator=generator).to(DEVICE)
        slab.write(index, torch.arange(slab.shape[1], device=DEVICE), *numbers)
    long, short = (Rows((5, 1, 2), 3, 20, 2), Rows((4, 0), 0, 13, 22)), (Rows((3, 5), 5, 8, 20),)
    tokens = StepTokens([(long, ([4, 0, 6],)), (short, ([3, 2],))])  # a window has passed the block in the middle

    writer.write(tokens)
    got = [layer.module.kv_cache.clone() for layer in layers]
    rows, positions, slots = tokens.slots(0, BLOCK, DEVICE)
    assert len(rows) < sum(part.count for part in (*long, *short))
    for index in chosen:
        layers[index].module.kv_cache.fill_(float("nan"))
        keys, values = slab.rows(index, rows)
        layers[index].write(rotate(keys, positions, rope), values, slots)
    for layer, found in zip(layers, got, strict=True):
        torch.testing.assert_close(found, layer.module.kv_cache, rtol=0, atol=0, equal_nan=True)
    assert all(got[index].nan_to_num().count_nonzero() for index in chosen)


@pytest.mark.parametrize("record_dtype", RECORD_DTYPES)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("roped", [True, False])
def test_keeps_what_any_packing_keeps(order: str, roped: bool, record_dtype: str) -> None:
    layers = layers_of(order, a_rope() if roped else None)
    slabs = [Slab(LAYERS, 6, HEADS, SIZE, torch.float32, DEVICE, record_dtype) for _ in range(2)]
    chosen = [2, 0]
    some = [layers[n] for n in chosen]
    fused = make_fused_reader(chosen, some, slabs[0])
    assert fused is not None
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        layer.module.kv_cache.copy_(torch.randn(layer.module.kv_cache.shape, generator=generator))
    tokens = StepTokens([((Rows((5, 1, 2, 4), 3, 27, 2),), ([4, 6],))])
    for slab, reader in zip(slabs, (fused, PackingReader(chosen, some, slabs[1])), strict=True):
        for tensor in (*parts(slab.keys), *parts(slab.values)):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        reader.read(tokens)
    every = torch.arange(slabs[0].shape[1], device=DEVICE)
    for index in range(LAYERS):
        for got, wanted in zip(*(slab.rows(index, every) for slab in slabs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            assert int((~wanted.isnan()).sum()) == (index in chosen) * 27 * HEADS * SIZE


def test_a_cache_that_is_packed_otherwise_goes_through_the_backend() -> None:
    layers = layers_of("HND", a_rope())
    swapped = Packing(layers[0].packing.values, layers[0].packing.keys)
    other = CachedLayer("other", layers[0].module, 0, BLOCK, HEADS, SIZE, layers[0].rope, swapped)
    assert make_fused([0], [other], Slab(LAYERS, 6, HEADS, SIZE, torch.float32, DEVICE)) is None
