"""Which models are refused, and that the rope probe sees a wrong rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.hf import ropes
from inferscale_mem.engines.hf.identity import fingerprint
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.engines.hf.records import RecordBytes
from inferscale_mem.engines.hf.support import obstacles
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import ConfigError, ModelError, SelfTestError, UnsupportedModelError

TINY = tiny_models.SIZES
PLAIN = EngineConfig(kind="transformers", dtype="float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.DeepseekV2Config(), "multi-head latent attention"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.Gemma3nTextConfig(), "share the keys and values"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "looks ahead"),
        (transformers.Llama4TextConfig(), "chunked_attention"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (
            transformers.Qwen2VLConfig(
                text_config={
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
                }
            ),
            "mrope_section",
        ),
        (
            transformers.Phi3Config(
                max_position_embeddings=8192,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                    "original_max_position_embeddings": 4096,
                },
            ),
            "max_model_len to 4096",
        ),
    ],
)
def test_configurations_that_stand_in_the_way(config: Any, reason: str) -> None:
    found = obstacles(config, 8192)
    assert any(reason in sentence for sentence in found), found


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, "glm4", "cohere2", "olmo2", "granite"])
def test_configurations_that_do_not(family: str) -> None:
    assert obstacles(tiny_models.make_config(family), 512) == []


def test_absolute_positions_are_found_by_the_probe(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=128, vocab_size=tiny_models.VOCAB)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no rotation of the model explains layer 0"):
        HFModel(str(tmp_path), PLAIN)
    assert HFModel(str(tmp_path), dataclasses.replace(PLAIN, connector=False)).layers == ()


def test_state_space_layers_are_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=tiny_models.VOCAB)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    tiny_models.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        TransformersEngine(str(tmp_path), dataclasses.replace(PLAIN, max_model_len=128))


@pytest.mark.parametrize(("channel", "factor"), [(slice(None), 0.8), (slice(-4, None), 0.5), (slice(0, 1), 0.9)])
def test_the_probe_sees_a_wrong_rotation(
    llama: str, monkeypatch: pytest.MonkeyPatch, channel: slice, factor: float
) -> None:
    """Of all channels, of the slowest ones only, of one alone."""
    right = ropes.candidates

    def wrong(*args: Any) -> Any:
        tables, reasons = right(*args)
        return [ropes.Candidate(c.name, _slowed(c.table, channel, factor)) for c in tables], reasons

    monkeypatch.setattr(ropes, "candidates", wrong)
    with pytest.raises(UnsupportedModelError, match="no rotation of the model explains layer 0's keys"):
        HFModel(llama, PLAIN)


def _slowed(table: Any, channel: slice, factor: float) -> Any:
    if table is None:
        return None
    angles = torch.atan2(table.sin, table.cos)
    positions = torch.arange(len(angles))[:, None]
    per_step = angles[1:2].expand_as(angles).clone()
    per_step[:, channel] *= factor
    return dataclasses.replace(table, cos=(positions * per_step).cos(), sin=(positions * per_step).sin())


def test_layers_without_rotation_are_found(tmp_path: Path) -> None:
    path = tiny_models.save("smollm3", tmp_path, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0])
    turned = [layer.rope is not None for layer in HFModel(path, PLAIN).layers]
    assert turned == [True, False, True, False]


def test_layers_that_own_a_rope_and_never_call_it_are_found(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    path = tiny_models.save("cohere2", tmp_path, layer_types=types, sliding_window=tiny_models.WINDOW)
    turned = [layer.rope is not None for layer in HFModel(path, PLAIN).layers]
    assert turned == [True, False]


def test_two_ropes_in_one_model_are_told_apart(tmp_path: Path) -> None:
    path = tiny_models.save("gemma3", tmp_path)
    local, full = (layer.rope for layer in HFModel(path, PLAIN).layers)
    assert local is not None and full is not None
    assert not torch.equal(local.cos, full.cos)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_not_taken_for_a_wrong_rotation(tmp_path: Path, dtype: str) -> None:
    for family in tiny_models.FAMILIES:
        path = tiny_models.save(family, tmp_path / family, num_hidden_layers=6)
        assert len(HFModel(path, dataclasses.replace(PLAIN, dtype=dtype)).layers) == 6


def test_settings_that_cannot_be(llama: str) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "int8"}, "dtype"),
        ({"max_model_len": 513}, "512 tokens"),
        ({"extra": (("swap_space", 4),)}, "extra"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            TransformersEngine(llama, dataclasses.replace(PLAIN, **settings))


def test_models_that_cannot_be_read(tmp_path: Path, llama: str) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        TransformersEngine(str(tmp_path / "nowhere"), PLAIN)
    (tmp_path / "config.json").write_text(Path(llama, "config.json").read_text())
    with pytest.raises(ModelError, match="cannot be loaded"):
        TransformersEngine(str(tmp_path), PLAIN)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(ModelError, match="no-such-thing"):
        TransformersEngine(str(tmp_path), PLAIN)


def test_the_fingerprint_changes_with_what_changes_kv_state(tmp_path: Path, llama: str) -> None:
    same = fingerprint(llama, "transformers", "float32")
    assert fingerprint(llama, "transformers", "float32") == same
    assert fingerprint(llama, "transformers", "bfloat16") != same
    other = tiny_models.save("llama", tmp_path / "theta", rope_theta=500000.0)
    assert fingerprint(other, "transformers", "float32") != same
    trained = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        trained.model.layers[0].self_attn.k_proj.weight += 0.01
    trained.save_pretrained(tmp_path / "trained")
    assert fingerprint(str(tmp_path / "trained"), "transformers", "float32") != same


def test_a_model_that_injects_wrongly_does_not_start(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., None] = RecordBytes.store

    def shifted(self: RecordBytes, pages: Any, start: int, end: int, cache: Any) -> None:
        right(self, pages, max(0, start - 1), max(0, start - 1) + end - start, cache)

    monkeypatch.setattr(RecordBytes, "store", shifted)
    with pytest.raises(SelfTestError, match="differently than with plain prefill"):
        TransformersEngine(llama, PLAIN)
    TransformersEngine(llama, dataclasses.replace(PLAIN, self_test=False)).close()
