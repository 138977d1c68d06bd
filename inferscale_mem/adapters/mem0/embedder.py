"""Mem0 embedder provider "inferscale": a sentence encoder on this machine, loaded when it is first needed."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mem0.configs.embeddings.base import BaseEmbedderConfig
from mem0.embeddings.base import EmbeddingBase

from inferscale_mem.adapters.mem0 import forking
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError, InputError, MissingDependencyError, ModelError
from inferscale_mem.models import resolve_embedder
from inferscale_mem.models.loading import LOADING

BATCH = 64
"""Texts per forward pass."""


class LocalEmbedder(EmbeddingBase):  # type: ignore[misc]  # Mem0 ships no types
    """Sentence embeddings by a BERT-like model: pooled last hidden states, of length 1.

    Thread-safe. The size is read from the config file; weights are loaded by the first ``embed``, and shared
    by all embedders of a process.

    Args:
        config: ``model`` is a folder or Hugging Face id (None: as the settings of this package say),
            ``model_kwargs`` may name a torch ``device`` ("cpu" if not given).

    Raises:
        ModelError: no such model, or no sentence encoder.
        ConfigError: ``embedding_dims`` is given and is not the model's.
    """

    def __init__(self, config: BaseEmbedderConfig | None = None) -> None:
        super().__init__(config)
        self.config.model = str(self.config.model or resolve_embedder(InferScaleConfig.from_env()))
        self._files = _Files(self.config.model)
        self.dims = self._files.dims
        if self.config.embedding_dims not in (None, self.dims):
            raise ConfigError(
                f"embedder.config.embedding_dims={self.config.embedding_dims}, but {self.config.model} gives "
                f"{self.dims}; leave the setting out."
            )
        self.config.embedding_dims = self.dims

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        """The embedding of one text: ``dims`` floats, L2 norm 1.

        Raises:
            InputError: not a string, or not valid Unicode.
        """
        return self.embed_batch([text], memory_action)[0]

    def embed_batch(self, texts: Sequence[str], memory_action: str | None = "add") -> list[list[float]]:
        """Embeddings of many texts, in their order; see ``embed``. Texts longer than the model reads are cut."""
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"Only text can be embedded, not {type(text).__name__}.")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise InputError("Text with lone surrogates cannot be embedded; decode it as UTF-8 first.")
        encoder = _encoders.get(self._files.source, self.config.model_kwargs.get("device", "cpu"))
        parts = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
        return [row for part in parts for row in encoder.encode(part, self._files.max_length, self._files.pooling)]


class _Encoder:
    """A loaded model."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], max_length: int, pooling: str) -> list[list[float]]:
        import torch  # only now: constructing a memory must not load torch

        # One at a time: fast tokenizers are not thread-safe, and parallel passes only fight for the same cores.
        with self._lock, torch.inference_mode():
            tokens = self._tokenizer(
                list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
            ).to(self._model.device)
            states = self._model(**tokens).last_hidden_state.float()
            if pooling == "cls":
                pooled = states[:, 0]
            else:
                mask = tokens["attention_mask"].unsqueeze(-1).float()
                pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            rows: list[list[float]] = torch.nn.functional.normalize(pooled, dim=-1).cpu().tolist()
        return rows


class _Encoders:
    """The models that this process has loaded: one per source and device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[str, str], _Encoder] = {}

    def get(self, source: str, device: str) -> _Encoder:
        """Loaded when first asked for."""
        with self._lock:
            if (source, device) not in self._loaded:
                self._loaded[source, device] = _load(source, device)
                forking.watch(self)
            return self._loaded[source, device]

    def leave_to_parent(self) -> None:
        """In a process that was forked: its first pass over torch's copied pool of threads would never return."""
        self._lock = threading.Lock()
        self._loaded = {}
        sys.modules["torch"].set_num_threads(1)


_encoders = _Encoders()


def _load(source: str, device: str) -> _Encoder:
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependencyError("transformers", "vllm") from error
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it is over in a moment
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        with LOADING:
            model = AutoModel.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"The embedder {source} cannot be loaded: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return _Encoder(tokenizer, model.to(device).eval())


class _Files:
    """What a sentence encoder's small files say about it: no weights are read.

    Attributes:
        source: what transformers loads it from.
        dims: length of its embeddings.
        max_length: tokens it reads of a text.
        pooling: "mean" or "cls".
    """

    def __init__(self, model: str) -> None:
        folder = Path(model).expanduser()
        self.source = str(folder) if folder.is_dir() else model
        config = self._read("config.json")
        if config is None:
            raise ModelError(f"The embedder {model} cannot be found; name a folder or a Hugging Face id.")
        dims = config.get("hidden_size", config.get("dim"))
        if not isinstance(dims, int):
            raise ModelError(f"The embedder {model} does not say its hidden_size; use a BERT-like sentence encoder.")
        self.dims = dims
        limit = (self._read("sentence_bert_config.json") or {}).get("max_seq_length")
        self.max_length = int(limit or config.get("max_position_embeddings", 512))
        pooling = self._read("1_Pooling/config.json") or {"pooling_mode_mean_tokens": True}
        modes = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
        known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        if len(modes) != 1 or modes[0] not in known:
            raise ModelError(f"The embedder {model} pools by {modes}; only mean and cls pooling are supported.")
        self.pooling = known[modes[0]]

    def _read(self, name: str) -> Mapping[str, Any] | None:
        folder = Path(self.source)
        path = folder / name if folder.is_dir() else _from_hub(self.source, name)
        if path is None or not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None


def _from_hub(model: str, name: str) -> Path | None:
    try:
        from transformers.utils.hub import cached_file
    except ImportError as error:
        raise MissingDependencyError("transformers", "vllm") from error
    try:
        path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ModelError(f"The embedder {model} cannot be found: {error}") from error
    return Path(path) if path else None
