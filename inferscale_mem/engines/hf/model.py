"""A Hugging Face causal language model: loading, what its layers keep, one forward step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.hf import ropes
from inferscale_mem.engines.hf.cache import RecordingCache
from inferscale_mem.engines.hf.records import LayerShape
from inferscale_mem.engines.hf.support import obstacles
from inferscale_mem.engines.processor import cpu_dtype
from inferscale_mem.errors import ConfigError, ModelError, UnsupportedModelError
from inferscale_mem.kv.rope_probe import TOLERANCE
from inferscale_mem.models.loading import LOADING

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HFModel:
    """A loaded model, on a GPU if there is one. Not thread-safe.

    Args:
        path: Hugging Face id or local folder.
        config: dtype, max_model_len and connector are heeded.

    Attributes:
        layers: what each layer keeps; empty with connector=False.

    Raises:
        ConfigError: an unknown dtype, or a context longer than the model's.
        ModelError: it cannot be found or read.
        UnsupportedModelError: its KV state cannot be moved (connector=True only).
    """

    def __init__(self, path: str, config: EngineConfig) -> None:
        self.path = path
        self.config = _load_config(path)
        text = self.config.get_text_config(decoder=True)
        self.max_model_len = _context(text, config.max_model_len)
        if config.connector and (reasons := obstacles(self.config, self.max_model_len)):
            raise UnsupportedModelError(path, reasons)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _load_model(path, _dtype(config.dtype, self.device)).to(self.device).eval().requires_grad_(False)
        self.dtype: torch.dtype = self._model.dtype
        self.vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        if config.connector and self.dtype not in DTYPES.values():
            raise UnsupportedModelError(path, [f"its keys are of {self.dtype}; set engine.dtype"])
        with torch.inference_mode():
            self.layers = self._probe(int(text.num_hidden_layers)) if config.connector else ()

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """What the model's own generation config sets."""
        found: Mapping[str, Any] = self._model.generation_config.to_diff_dict()
        return found

    def end_tokens(self, tokenizer_eos: int | None) -> tuple[int, ...]:
        """Tokens that end an answer: the generation config's, and the tokenizer's."""
        own = self._model.generation_config.eos_token_id
        ids = own if isinstance(own, list) else [own]
        return tuple(sorted({int(i) for i in [*ids, tokenizer_eos] if i is not None}))

    def new_cache(self, record: bool = False) -> RecordingCache:
        """An empty cache for one request."""
        return RecordingCache(self.config, record)

    def forward(self, ids: Sequence[Sequence[int]], cache: RecordingCache) -> torch.Tensor:
        """Compute the next tokens of a batch, on top of its cache.

        Args:
            ids: [B, T] token ids.
            cache: of the same batch.

        Returns:
            Logits of the last position, [B, vocab_size] float32 on the CPU.
        """
        return self.forward_last(ids, cache, 1)[:, -1]

    def forward_last(self, ids: Sequence[Sequence[int]], cache: RecordingCache, n: int) -> torch.Tensor:
        """As ``forward``; logits of the last n positions, [B, n, vocab_size] float32 on the CPU."""
        with torch.inference_mode():
            return self.run(ids, cache, n).float().cpu()

    def run(self, ids: Sequence[Sequence[int]], cache: RecordingCache, n: int) -> torch.Tensor:
        """As ``forward_last``; logits as the model gives them, and gradients pass through where they are on."""
        made = self._model(
            input_ids=torch.tensor(ids, device=self.device), past_key_values=cache, use_cache=True, logits_to_keep=n
        )
        logits: torch.Tensor = made.logits[:, -n:]
        return logits

    def _probe(self, num_layers: int) -> tuple[LayerShape, ...]:
        tables, reasons = ropes.candidates(self._model, self.dtype, self.max_model_len)
        cache, positions = ropes.probe(self._model, self.config, self.vocab_size // 2, self.max_model_len)
        silent = sorted(set(range(num_layers)) - cache.recorded_layers)
        if silent:
            raise UnsupportedModelError(self.path, [f"layers {silent} keep no keys and values"])
        layers = []
        for i in range(num_layers):
            keys, values = cache.recorded(i, 0, len(positions))
            if keys.shape != values.shape:
                raise UnsupportedModelError(self.path, [f"layer {i} has keys and values of different sizes"])
            best, off = ropes.choose(keys, positions, tables)
            if not off < TOLERANCE[self.dtype]:
                found = f"no rotation of the model explains layer {i}'s keys (nearest: {best.name}, off by {off:.2g})"
                raise UnsupportedModelError(self.path, [found, *reasons])
            layers.append(LayerShape(keys.shape[1], keys.shape[2], best.table))
        return tuple(layers)


def _load_config(path: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"No usable model at {path!r}: {error}. Check the model's name or folder.") from error


def _load_model(path: str, dtype: torch.dtype | str) -> Any:
    try:
        with LOADING:
            return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"The model at {path!r} cannot be loaded: {error}") from error


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"engine.dtype={name!r} is not known; use 'auto' or one of {', '.join(DTYPES)}.")
    return DTYPES.get(cpu_dtype(name) if device.type == "cpu" else name, "auto")


def _context(text: Any, asked: int | None) -> int:
    trained = getattr(text, "max_position_embeddings", None)
    if asked is not None and trained is not None and asked > trained:
        raise ConfigError(f"engine.max_model_len={asked} is more than the {trained} tokens the model was trained for.")
    length = asked or trained
    if length is None:
        raise ConfigError("The model does not say how long its context is; set engine.max_model_len.")
    return int(length)
