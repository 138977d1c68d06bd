"""Both writers leave the same bits in the paged cache, in every packing that vLLM's CPU backend has on this machine."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops

from inferscale_mem.config import RECORD_DTYPES
from inferscale_mem.kv.connector.layers import CachedLayer
from inferscale_mem.kv.connector.metadata import Rows
from inferscale_mem.kv.connector.tokens import StepTokens
from inferscale_mem.kv.connector.writing import BackendWriter, OnePassWriter, make_writers
from inferscale_mem.kv.packing import learn_packing
from inferscale_mem.kv.rope import RopeTable
from inferscale_mem.kv.slab import Scratch, Slab

LAYERS, BLOCKS, HEADS, SIZE, BLOCK = 2, 6, 3, 64, 32


class Attention:
    """As much of vLLM's attention layer, and of its backend, as is written through."""

    def __init__(self, isa: str, dtype: torch.dtype) -> None:
        self.isa, self.impl = isa, self
        self.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=dtype)

    def do_kv_cache_update(
        self, _: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        key_cache, value_cache = cache.view(len(cache), HEADS, 2 * BLOCK, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, self.isa)


def layers_of(isa: str, dtype: torch.dtype, rope: RopeTable | None) -> list[CachedLayer]:
    modules = [Attention(isa, dtype) for _ in range(LAYERS)]
    packing = learn_packing(
        lambda keys, values, cache, slots: modules[0].do_kv_cache_update(None, keys, values, cache, slots),
        torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=dtype),
        SIZE,
    )
    return [CachedLayer(str(n), m, 0, BLOCK, HEADS, SIZE, rope, packing) for n, m in enumerate(modules)]


def a_rope(dtype: torch.dtype) -> RopeTable:
    angles = torch.outer(torch.arange(256.0), 0.5 ** torch.arange(SIZE // 2))
    return RopeTable(angles.cos().to(dtype).float(), angles.sin().to(dtype).float(), True, dtype)


def fill(slab: Slab) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(slab.shape[1])
    for layer in range(slab.shape[0]):
        slab.write(layer, rows, *torch.randn(2, *slab.shape[1:], generator=generator, dtype=slab.row_dtype))


def supported(isa: str) -> bool:
    return isa != "amx" or torch.cpu._is_amx_tile_supported()


@pytest.mark.parametrize("record_dtype", RECORD_DTYPES)
@pytest.mark.parametrize("rope", [a_rope(torch.bfloat16), None], ids=["rope", "no rope"])
@pytest.mark.parametrize("isa", [isa for isa in ("amx", "vec", "vec16") if supported(isa)])
def test_one_pass_writes_what_the_backend_writes(isa: str, rope: RopeTable | None, record_dtype: str) -> None:
    for got, wanted in zip(*written(isa, torch.bfloat16, rope, record_dtype), strict=True):
        assert wanted.count_nonzero() > 0
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("record_dtype", RECORD_DTYPES)
@pytest.mark.parametrize("rope", [a_rope(torch.float32), None], ids=["rope", "no rope"])
def test_so_it_does_in_float32(rope: RopeTable | None, record_dtype: str) -> None:
    """But for last bits: vLLM's kernel fuses multiplying and adding."""
    for got, wanted in zip(*written("vec", torch.float32, rope, record_dtype), strict=True):
        assert wanted.count_nonzero() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(got == 0, wanted == 0)


def written(isa: str, dtype: torch.dtype, rope: RopeTable | None, record_dtype: str) -> list[list[torch.Tensor]]:
    """The caches of all layers, written in one pass and by the backend."""
    layers = layers_of(isa, dtype, rope)
    slab = Slab(LAYERS, 20, HEADS, SIZE, dtype, torch.device("cpu"), record_dtype)
    fill(slab)
    segments = Rows((7, 2, 19, 3, 12, 4), 3, 40, 7), Rows((5, 11, 0, 8, 1, 6, 13, 9), 1, 61, 47)
    tokens = StepTokens([(segments, ([4, 1, 5, 2],))])
    (one_pass,) = make_writers(layers, slab)
    assert isinstance(one_pass, OnePassWriter)
    found = []
    backend = BackendWriter(range(LAYERS), layers, slab, Scratch(HEADS, SIZE, slab.row_dtype, slab.device))
    for writer in (one_pass, backend):
        writer.write(tokens)
        found.append([layer.module.kv_cache.clone() for layer in layers])
        for layer in layers:
            layer.module.kv_cache.zero_()
    return found


def test_other_data_types_go_through_the_backend() -> None:
    layers = layers_of("vec", torch.float16, a_rope(torch.float16))
    slab = Slab(LAYERS, 4, HEADS, SIZE, torch.float16, torch.device("cpu"))
    assert [type(writer) for writer in make_writers(layers, slab)] == [BackendWriter]


def test_layers_that_differ_get_writers_of_their_own() -> None:
    rope = a_rope(torch.bfloat16)
    first, second = layers_of("vec", torch.bfloat16, rope)
    other = CachedLayer("other", second.module, 1, BLOCK, HEADS, SIZE, rope, first.packing)
    slab = Slab(LAYERS, 4, HEADS, SIZE, torch.bfloat16, torch.device("cpu"))
    assert sorted(writer.group for writer in make_writers([first, other], slab)) == [0, 1]
