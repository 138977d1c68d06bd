"""Which models' KV state can be stored before RoPE and moved, as far as their configuration tells."""

from __future__ import annotations

from typing import Any

KNOWN_LAYERS = ("full_attention", "sliding_attention")


def obstacles(config: Any, max_model_len: int) -> list[str]:
    """One sentence for each thing in a model's configuration that stands in the way; the rope probe finds the rest.

    Args:
        config: a transformers configuration; of a model of several parts, the text part is looked at.
        max_model_len: longest request.
    """
    text = config.get_text_config(decoder=True)
    found = []
    if getattr(config, "is_encoder_decoder", False):
        found.append("it is an encoder-decoder model")
    if getattr(text, "kv_lora_rank", None):
        found.append(f"it uses multi-head latent attention (kv_lora_rank={text.kv_lora_rank})")
    if getattr(text, "num_kv_shared_layers", None):
        found.append(f"{text.num_kv_shared_layers} of its layers share the keys and values of others")
    if getattr(text, "use_bidirectional_attention", None):
        found.append("its attention looks ahead (use_bidirectional_attention)")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - set(KNOWN_LAYERS))
    if unknown:
        found.append(f"it has layers of type {', '.join(unknown)}; only full and sliding attention can be moved")
    return found + [reason for rope in _ropes(text) for reason in _rope_obstacles(rope, text, max_model_len)]


def _ropes(text: Any) -> list[dict[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [rope for rope in parameters.values() if isinstance(rope, dict)]
    return nested or [parameters]


def _rope_obstacles(rope: dict[str, Any], text: Any, max_model_len: int) -> list[str]:
    if rope.get("mrope_section"):
        return ["it uses multimodal rotary positions (mrope_section)"]
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and original and max_model_len > original:
        return [
            f"its longrope rotates short and long requests differently: set engine.max_model_len to {original} or less"
        ]
    return []
