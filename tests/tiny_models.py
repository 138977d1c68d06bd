"""Tiny models with random weights and a byte tokenizer: every family's own code, in milliseconds.

Weights are larger than a fresh model's, so that an answer depends strongly on every key and value.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL) + 5
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")


def save(family: str, folder: Path, **changes: Any) -> str:
    """Make a model and its tokenizer in ``folder``; returns the folder as a string."""
    torch.manual_seed(0)
    config = make_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Logits of zero: greedy answers are printable ASCII, and never end by themselves.
        model.get_output_embeddings().weight[_unprintable()] = 0.0
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return os.fspath(folder)


def make_config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The configuration of a tiny model; a hybrid one for gemma3, with a window of WINDOW tokens for mistral."""
    sizes = {**SIZES, **changes}
    layers = sizes["num_hidden_layers"]
    if family == "gemma3":
        types = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        sizes = {"layer_types": types, "sliding_window": WINDOW, "query_pre_attn_scalar": 32, **sizes}
        return transformers.Gemma3TextConfig(**sizes)
    if family == "mistral":
        return transformers.MistralConfig(**{"sliding_window": WINDOW, **sizes})
    return transformers.AutoConfig.for_model(family, **sizes)


def _unprintable() -> list[int]:
    made = tokenizer()
    texts = {i: made.decode([i]) for i in range(256)}
    return [i for i in range(VOCAB) if not (texts.get(i, "\0").isascii() and texts.get(i, "\0").isprintable())]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 255 in the order of the byte alphabet, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    made.chat_template = TEMPLATE
    return made
