"""How a block of a paged cache orders its elements, as far as a kernel needs to know it to write fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

Form = Literal["rows", "columns", "column pairs", "token pairs"]
"""``rows``: a token's channels follow each other. ``columns``: a channel's tokens do. ``column pairs``: pairs of
channels are kept together, and a pair's tokens follow each other (what AMX multiplies by). ``token pairs``: the other
way round."""

FORMS: tuple[Form, ...] = ("rows", "columns", "column pairs", "token pairs")
_SHORTEST = 8
"""Elements in a row below which a form is not worth having."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Where the elements of keys, or of values, lie in a block: ``head * head_stride + token[t] + channel[d]``.

    Attributes:
        form: see ``Form``.
        token: uint64 [block_size].
        channel: uint64 [head_size].
        head_stride: elements.
        group: so many tokens, from a multiple of it on, can be written in one go.
        chunk: so many channels can; only in ``token pairs``.
    """

    form: Form
    token: np.ndarray[tuple[int], np.dtype[np.uint64]]
    channel: np.ndarray[tuple[int], np.dtype[np.uint64]]
    head_stride: int
    group: int
    chunk: int


def find_layout(offsets: torch.Tensor) -> BlockLayout | None:
    """The layout of a block.

    Args:
        offsets: int64 [block_size, num_kv_heads, head_size]: each element's place in the block.

    Returns:
        None if it is none of those above.
    """
    block_size, heads, head_size = offsets.shape
    origin = offsets[:1, :1, :1]
    token, head, channel = offsets[:, :1, :1], offsets[:1, :, :1] - origin, offsets[:1, :1, :] - origin
    stride = int(head[0, 1, 0]) if heads > 1 else 0
    if not torch.equal(token + head + channel, offsets) or head_size % 2 or block_size % 2:
        return None
    if head.flatten().tolist() != [stride * number for number in range(heads)]:
        return None
    by_token, by_channel = token.flatten().numpy(), channel.flatten().numpy()
    form, group, chunk = _form(by_token, by_channel)
    if form is None or (form in ("column pairs", "token pairs") and stride % 2):
        return None
    return BlockLayout(form, by_token.astype(np.uint64), by_channel.astype(np.uint64), stride, group, chunk)


def _form(token: np.ndarray, channel: np.ndarray) -> tuple[Form | None, int, int]:
    if _run(channel, 1) == len(channel):
        return "rows", len(token), len(channel)
    if (group := _run(token, 1)) >= _SHORTEST:
        return "columns", group, 1
    if _paired(channel) and not np.any(token % 2) and (group := _run(token, 2)) >= _SHORTEST:
        return "column pairs", group, 1
    if _paired(token) and not np.any(channel % 2) and (chunk := _run(channel, 2)) >= _SHORTEST:
        return "token pairs", len(token), chunk
    return None, 0, 0


def _run(offsets: np.ndarray, step: int) -> int:
    """The longest length n that divides the whole such that each stretch of n goes up by ``step``."""
    breaks = np.flatnonzero(np.diff(offsets) != step) + 1
    return int(np.gcd.reduce(np.append(breaks, len(offsets))))


def _paired(offsets: np.ndarray) -> bool:
    """Whether elements come in twos, the first at an even place."""
    return not np.any(offsets[::2] % 2) and np.array_equal(offsets[1::2], offsets[::2] + 1)


def example(form: Form, block_size: int, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a backend that packs like this keeps each element of a block: in each head its keys, then its values.

    Args:
        form: of both; "column pairs" keeps 16 tokens together and "token pairs" 16 channels (or 8), as AMX takes them.
        block_size, num_kv_heads, head_size: a whole number of such groups.

    Returns:
        Two int64 [block_size, num_kv_heads, head_size], of keys and of values.
    """
    count = block_size * head_size
    numbers = torch.arange(count)
    if form == "rows":
        head = numbers.view(block_size, head_size)
    elif form == "columns":
        head = numbers.view(head_size, block_size).T
    elif form == "column pairs":  # [group of tokens, pair of channels, token, of the pair]
        head = numbers.view(block_size // 16, head_size // 2, 16, 2).permute(0, 2, 1, 3).reshape(block_size, head_size)
    else:  # [group of channels, pair of tokens, channel, of the pair]
        group = 16 if head_size % 16 == 0 else 8
        order = numbers.view(head_size // group, block_size // 2, group, 2).permute(1, 3, 0, 2)
        head = order.reshape(block_size, head_size)
    keys = head[:, None, :] + 2 * count * torch.arange(num_kv_heads)[:, None]
    return keys, keys + count
