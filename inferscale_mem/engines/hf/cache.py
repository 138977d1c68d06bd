"""A transformers cache that can be filled with records, and that tells what the model writes to it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache


class RecordingCache(DynamicCache):
    """Keys and values of a batch of prompts; sliding-window layers keep only what their window can still see.

    Args:
        config: the model's.
        record: keep aside all that the model writes, for ``recorded``.
    """

    def __init__(self, config: Any, record: bool = False) -> None:
        super().__init__(config=config)
        self._record = record
        self._start = 0
        self._written: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: [B, H, T, D] rotated keys, and values, of the new tokens."""
        if self._record:
            self._written.setdefault(layer_idx, []).append((key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def inject(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill an empty cache's layer with [T, H, D] rotated keys, and values, of the prompt's first T tokens."""
        self._start = len(keys)
        super().update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)

    def recorded(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, [end - start, H, D] each, that the model wrote for prompt tokens start to end."""
        keys, values = (torch.cat(parts, dim=2)[0] for parts in zip(*self._written[layer], strict=True))
        first, last = start - self._start, end - self._start
        return keys[:, first:last].transpose(0, 1), values[:, first:last].transpose(0, 1)

    @property
    def recorded_layers(self) -> frozenset[int]:
        """Layers that wrote anything."""
        return frozenset(self._written)
