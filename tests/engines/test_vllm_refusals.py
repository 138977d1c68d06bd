"""Models whose KV cannot be moved are refused by name before the engine starts, with every reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import transformers

from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.engines import open_engine
from inferscale_mem.errors import ChatTemplateError, EngineError, ModelError, UnsupportedModelError

pytestmark = pytest.mark.engine

SMALL = {"vocab_size": tiny_models.VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}


def folder_with(config: transformers.PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return str(folder)


def test_mla_is_refused(tmp_path: Path) -> None:
    from inferscale_mem.engines.vllm_local import VllmEngine

    config = transformers.DeepseekV2Config(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=2,
        first_k_dense_replace=2,
        architectures=["DeepseekV2ForCausalLM"],
    )
    with pytest.raises(UnsupportedModelError, match="MLA") as refused:
        VllmEngine(folder_with(config, tmp_path), EngineConfig())
    assert refused.value.reasons


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    from inferscale_mem.engines.vllm_local import VllmEngine

    config = transformers.MambaConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=128, num_hidden_layers=2, architectures=["MambaForCausalLM"]
    )
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        VllmEngine(folder_with(config, tmp_path), EngineConfig())


def test_a_quantised_kv_cache_is_refused(smollm2_path: str) -> None:
    from inferscale_mem.engines.vllm_local import VllmEngine

    with pytest.raises(UnsupportedModelError, match="kv_cache_dtype=fp8"):
        VllmEngine(smollm2_path, EngineConfig(extra=(("kv_cache_dtype", "fp8"),)))


def test_unknown_models_are_named(tmp_path: Path) -> None:
    for model in ("nobody/no-such-model", str(tmp_path)):
        with pytest.raises(ModelError):
            open_engine(InferScaleConfig(model=model, home=tmp_path))


def test_an_architecture_vllm_does_not_know(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, num_attention_heads=4, architectures=["NobodyForCausalLM"])
    with pytest.raises((ModelError, EngineError)) as refused:
        open_engine(InferScaleConfig(model=folder_with(config, tmp_path), home=tmp_path))
    assert "NobodyForCausalLM" in str(refused.value)


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    from inferscale_mem.engines.vllm_local import VllmEngine

    path = tiny_models.save("llama", tmp_path, hidden_size=128)
    (tmp_path / "chat_template.jinja").unlink()
    engine = VllmEngine(path, EngineConfig(multiprocess=False, record_bytes=1 << 20, kv_cache_bytes=16 << 20))
    try:
        with pytest.raises(ChatTemplateError, match="chat template"):
            engine.tokenizer.render([{"role": "user", "content": "Hello"}])
    finally:
        engine.close()
