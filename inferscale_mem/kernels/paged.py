"""What kernels are told about paged caches, and about the tokens of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

_WIDEST = 16
"""Bytes of one access."""


class PagedCaches:
    """Keys and values of some layers in their paged caches, however strided: NHD, HND, keys beside values or apart.

    Args:
        keys: per layer a view [num_blocks, block_size, H, D], all of one device, dtype and stride; channels follow each
            other.
        values: likewise, of the same strides.

    Attributes:
        keys, values: addresses of each layer's, int64 on their device.
        sample: a tensor of the dtype.
        block_size: tokens.
        block_stride, token_stride, head_stride: in elements.
        aligned: bytes of which all addresses are multiples, 16 at most.

    Raises:
        ValueError: views that differ, or whose channels do not follow each other.
    """

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        views = (*keys, *values)
        first = views[0]
        if any((v.shape, v.stride(), v.dtype, v.device) != (first.shape, first.stride(), first.dtype, first.device)
               for v in views):  # fmt: skip
            raise ValueError("the caches of one launch must be of one shape, stride, dtype and device")
        if first.stride(3) != 1:
            raise ValueError("the channels of a head must follow each other")
        self._kept = views  # the addresses below are theirs
        self.device, self.sample = first.device, first
        self.block_size = first.shape[1]
        self.block_stride, self.token_stride, self.head_stride = first.stride()[:3]
        self.keys, self.values = (
            torch.tensor([view.data_ptr() for view in part], dtype=torch.int64, device=first.device)
            for part in (keys, values)
        )
        self.aligned = math.gcd(_WIDEST, *(view.data_ptr() for view in views))
        self._layers = len(keys)

    def __len__(self) -> int:
        return self._layers


class Step:
    """Tokens of a step: which rows of the slab, at which positions of which request.

    All numbers go to the device in one copy, which the host does not wait for.

    Args:
        rows: [T], of the slab.
        positions: [T], in the prompt.
        tables: [T]: where in ``blocks`` the block table of a token's request begins.
        blocks: block tables, one after the other: [positions // block_size] is a token's block.
        device: where to.

    Attributes:
        numbers: int32: rows, positions, tables, blocks.
        num_tokens: T.
    """

    def __init__(
        self, rows: np.ndarray, positions: np.ndarray, tables: np.ndarray, blocks: np.ndarray, device: torch.device
    ) -> None:
        assert len(rows) == len(positions) == len(tables)
        numbers = torch.from_numpy(np.concatenate((rows, positions, tables, blocks)).astype(np.int32))
        if device.type == "cuda":
            numbers = numbers.pin_memory()
        self.numbers = numbers.to(device, non_blocking=True)
        self.num_tokens = len(rows)

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64, in the prompt, on the device."""
        return self.numbers[self.num_tokens : 2 * self.num_tokens].long()
