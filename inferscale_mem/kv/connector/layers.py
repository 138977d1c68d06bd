"""Where a running vLLM model keeps the keys and values we move: its attention layers, their caches, their ropes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

from inferscale_mem.kv.host_memory import use_huge_pages
from inferscale_mem.kv.packing import Packing, learn_packing
from inferscale_mem.kv.rope import RopeTable
from inferscale_mem.kv.slab import bytes_per_head


@dataclass(frozen=True)
class CachedLayer:
    """One attention layer with a cache of its own.

    Attributes:
        name: as vLLM calls it.
        module: vLLM's attention layer.
        group: index of its KV cache group.
        block_size: tokens per block of that group.
        num_kv_heads, head_size: on this rank.
        rope: how its keys are rotated; None for a layer without RoPE.
        packing: how its cache is laid out.
    """

    name: str
    module: Any
    group: int
    block_size: int
    num_kv_heads: int
    head_size: int
    rope: RopeTable | None
    packing: Packing

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rotated keys and values [T, num_kv_heads, head_size] into slots [T] of the paged cache."""
        self.module.impl.do_kv_cache_update(self.module, keys, values, self.module.kv_cache, slots)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values [T, num_kv_heads, head_size] at slots [T] of the paged cache."""
        return self.packing.read(self.module.kv_cache, slots)


def layer_specs(config: KVCacheConfig) -> dict[str, tuple[int, KVCacheSpec]]:
    """Layer name -> its group's index and its own spec."""
    found = {}
    for index, group in enumerate(config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            found[name] = (index, specs.get(name, group.kv_cache_spec))
    return found


def unsupported_config(config: VllmConfig) -> list[str]:
    """Reasons, visible before the engine starts, why this model's KV cannot be stored and moved."""
    reasons = []
    model = config.model_config
    if model.use_mla:
        reasons.append("its attention is MLA, which caches a compressed latent instead of keys and values")
    if model.uses_mrope:
        reasons.append("its positions are multi-dimensional (mRoPE)")
    if model.is_encoder_decoder:
        reasons.append("it is an encoder-decoder model")
    if model.is_hybrid or model.is_attention_free:
        reasons.append("it has recurrent (Mamba or linear attention) layers, whose state cannot be cut into facts")
    if config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        reasons.append(f"its KV cache is quantised (kv_cache_dtype={config.cache_config.cache_dtype})")
    if config.speculative_config is not None:
        reasons.append("speculative decoding is on")
    if config.parallel_config.decode_context_parallel_size > 1:
        reasons.append("decode context parallelism is on")
    return reasons


def unsupported_cache(config: KVCacheConfig) -> list[str]:
    """Reasons, visible once the caches are laid out, why this model's KV cannot be stored and moved."""
    reasons = set()
    for _, spec in layer_specs(config).values():
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            reasons.add(f"a KV cache group is neither full nor sliding-window attention ({type(spec).__name__})")
        elif getattr(spec, "attention_chunk_size", None):
            reasons.add("it uses chunked local attention")
        elif getattr(spec, "non_causal", False):
            reasons.add("its attention is not causal")
        elif getattr(spec, "head_size_v", spec.head_size) != spec.head_size:  # type: ignore[attr-defined]
            reasons.add("its keys and values have different sizes")
    return sorted(reasons)


def bytes_per_token(config: KVCacheConfig, record_dtype: str) -> int:
    """Bytes of keys and values of one token, all layers of one rank, as records store them."""
    return sum(
        2 * spec.num_kv_heads * bytes_per_head(spec.head_size, spec.dtype, record_dtype)  # type: ignore[attr-defined]
        for _, spec in layer_specs(config).values()
        if hasattr(spec, "head_size")
    )


def find_layers(config: VllmConfig, cache_config: KVCacheConfig) -> list[CachedLayer]:
    """The layers to move, in the model's order. Layers that read another layer's cache are left out.

    Raises:
        UnsupportedModelError: a rope that is not known.
        EngineError: a cache that does not keep what is written.
    """
    context = config.compilation_config.static_forward_context
    modules = {
        name: context[name]
        for name in layer_specs(cache_config)
        if not getattr(context[name], "kv_sharing_target_layer_name", None)
    }
    _touch(modules)
    # vLLM 0.32's attention uses AMX tiles, but leaves it to oneDNN to ask the system for them; a small bfloat16 model
    # that got by without oneDNN would end with an illegal instruction.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    parents = _parents(modules)
    tables: dict[int, RopeTable] = {}
    packings: dict[tuple[Any, ...], Packing] = {}
    layers = []
    for name, module in modules.items():
        group, spec = layer_specs(cache_config)[name]
        rope = _rope(parents.get(name), config, tables)
        packing = _packing(module, packings)
        layers.append(
            CachedLayer(name, module, group, spec.block_size, module.num_kv_heads, module.head_size, rope, packing)
        )
    return layers


def _touch(modules: Mapping[str, Any]) -> None:
    """Have the system provide a CPU cache's memory now; page by page it would slow down each block's first use."""
    for module in modules.values():
        if module.kv_cache.device.type == "cpu":
            use_huge_pages(module.kv_cache)
            module.kv_cache.zero_()


def _parents(modules: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Layer name -> the module it is a child of (vLLM keeps no way up from a layer)."""
    names = {id(module): name for name, module in modules.items()}
    found = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.nn.Module):
            continue
        for child in candidate.__dict__.get("_modules", {}).values():
            if id(child) in names:
                found[names[id(child)]] = candidate
    return found


def _rope(parent: torch.nn.Module | None, config: VllmConfig, tables: dict[int, RopeTable]) -> RopeTable | None:
    if parent is None or not getattr(parent, "use_rope", True):
        return None
    rotary = getattr(parent, "rotary_emb", None)
    if rotary is None:
        return None
    if id(rotary) not in tables:
        model = config.model_config
        assert isinstance(model.dtype, torch.dtype)
        tables[id(rotary)] = RopeTable.from_module(rotary, dtype=model.dtype, max_positions=model.max_model_len)
    return tables[id(rotary)]


def _packing(module: Any, known: dict[tuple[Any, ...], Packing]) -> Packing:
    cache = module.kv_cache
    key = (type(module.impl), tuple(cache.shape[1:]), cache.stride()[1:], cache.dtype)
    if key not in known:
        scratch = cache[:2].clone()

        def write(keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
            module.impl.do_kv_cache_update(module, keys, values, blocks, slots)

        known[key] = learn_packing(write, scratch, module.head_size)
    return known[key]
