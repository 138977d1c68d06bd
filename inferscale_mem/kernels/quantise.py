"""Records in fewer bits: the formats, and plain torch that makes and reads them.

``int8``: signed codes and a scale. ``int4``: codes 0 to 15, two to a byte, with a scale and a zero, which also serves
channels that are far from zero. A scale belongs to some rows and some channels of one head: one format covers "per
token and head" (rows 1, channels all) as well as "per channel" (rows 16, channels 1), which suits keys before RoPE.

An element is ``zero + code * scale``. Scales and zeros are float16: a code times a scale then is exact in float32, so
that every way of computing an element (fused or not) gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, eq=False)
class Quantised:
    """Rows of records in fewer bits.

    Attributes:
        codes: int8 [..., R, H, D], or uint8 [..., R, H, D // 2]: byte i holds channel i in its low half, and channel
            i + D // 2 in its high half.
        scale: float16 [..., ceil(R / rows), H, D // channels].
        zero: likewise; None for int8.
        rows: how many rows share a scale, from a multiple of it on.
        channels: how many channels do; divides D.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    rows: int
    channels: int

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 8 if self.zero is None else 4

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., R, H, D] of what is stored."""
        *rows, width = self.codes.shape
        return (*rows, width * 8 // self.bits)

    def __getitem__(self, layer: int) -> Quantised:
        """One layer of [L, R, H, D]; shares memory."""
        zero = None if self.zero is None else self.zero[layer]
        return Quantised(self.codes[layer], self.scale[layer], zero, self.rows, self.channels)


Stored = torch.Tensor | Quantised
"""Rows of records as they are kept: floats, or in fewer bits."""


def quantise(x: torch.Tensor, bits: int, *, rows: int = 1, channels: int | None = None) -> Quantised:
    """Store rows in fewer bits; each element is off by at most half its scale (where that is finite in float16).

    Args:
        x: [..., R, H, D], any float dtype.
        bits: 8 or 4.
        rows: how many share a scale; where R is not a multiple, the last ones are fewer.
        channels: how many share a scale; all of a head if None.

    Raises:
        ValueError: other bits, channels that do not divide D, or an odd D with 4 bits.
    """
    size = x.shape[-1]
    channels = channels or size
    if bits not in (8, 4) or rows < 1 or size % channels or (bits == 4 and size % 2):
        raise ValueError(f"no format of {bits} bits, {rows} rows and {channels} channels for heads of {size}")
    grouped = _grouped(x.float(), rows, channels)
    low, high = grouped.amin((-4, -1), keepdim=True), grouped.amax((-4, -1), keepdim=True)
    if bits == 8:
        zero, scale = None, round_up(torch.maximum(-low, high) / 127)
        codes = _codes(grouped, scale).clamp(-127, 127).to(torch.int8)
    else:
        zero = -round_up(-low)
        scale = round_up((high - zero.float()) / 15)
        codes = _codes(grouped - zero.float(), scale).clamp(0, 15).to(torch.uint8)
    codes = _ungrouped(codes, x.shape[-3])
    if zero is not None:
        first, second = codes.chunk(2, dim=-1)
        codes, zero = first | second << 4, zero[..., :, 0, :, :, 0]
    return Quantised(codes.contiguous(), scale[..., :, 0, :, :, 0].contiguous(), zero, rows, channels)


def blank(shape: tuple[int, int, int, int], dtype: torch.dtype, bits: int | None, device: torch.device) -> Stored:
    """Room for rows, contents undefined.

    Args:
        shape: [L, R, H, D].
        dtype: of the floats, where ``bits`` is None.
        bits: 8: each head of a row has a scale of its own. None: floats.
        device: where to.
    """
    if bits is None:
        return torch.empty(shape, dtype=dtype, device=device)
    assert bits == 8
    codes = torch.empty(shape, dtype=torch.int8, device=device)
    scale = torch.empty((*shape[:3], 1), dtype=torch.float16, device=device)
    return Quantised(codes, scale, None, 1, shape[3])


def parts(stored: Stored) -> tuple[torch.Tensor, ...]:
    """The tensors that hold them, each [..., R, H, C]."""
    if isinstance(stored, torch.Tensor):
        return (stored,)
    return (stored.codes, stored.scale) if stored.zero is None else (stored.codes, stored.scale, stored.zero)


def keep(stored: Stored, rows: torch.Tensor, numbers: torch.Tensor) -> None:
    """Store rows.

    Args:
        stored: [R, H, D]; changed. In fewer bits only if each row has scales of its own.
        rows: int64 [T], different ones.
        numbers: [T, H, D], any float dtype.
    """
    if isinstance(stored, Quantised):
        assert stored.rows == 1
        made: Stored = quantise(numbers, stored.bits, channels=stored.channels)
    else:
        made = numbers.to(stored.dtype)
    for part, new in zip(parts(stored), parts(made), strict=True):
        part.index_copy_(0, rows, new)


def dequantise(stored: Stored, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Rows as numbers: [..., R, H, D] float32, exact; or floats as they are stored.

    Args:
        stored: [..., R, H, D].
        rows: int64 [T]: only these; all if None.
    """
    if isinstance(stored, torch.Tensor):
        return stored if rows is None else stored[..., rows, :, :]
    if rows is None:
        rows = torch.arange(stored.shape[-3], device=stored.codes.device)
    codes = stored.codes[..., rows, :, :]
    if stored.zero is not None:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    scale = stored.scale[..., rows // stored.rows, :, :].float().repeat_interleave(stored.channels, dim=-1)
    numbers = codes.float() * scale
    if stored.zero is None:
        return numbers
    return numbers + stored.zero[..., rows // stored.rows, :, :].float().repeat_interleave(stored.channels, dim=-1)


def parts_of(stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """What a kernel is given: codes, scales and zeros (or something in their place), then bits (0: floats), and how
    many rows and channels share a scale. All contiguous."""
    if not isinstance(stored, Quantised):
        assert stored.is_contiguous()
        return stored, stored, stored, 0, 1, stored.shape[-1]
    zero = stored.scale if stored.zero is None else stored.zero
    assert all(part.is_contiguous() for part in (stored.codes, stored.scale, zero))
    return stored.codes, stored.scale, zero, stored.bits, stored.rows, stored.channels


def round_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 that is not below ``x`` (float32), or the largest finite one of its sign."""
    near = x.clamp(-_LARGEST, _LARGEST).half()
    bits = near.view(torch.int16)
    above = torch.where(near == 0, 1, torch.where(bits >= 0, bits + 1, bits - 1)).to(torch.int16).view(torch.float16)
    return torch.where((near.float() < x) & (near < _LARGEST), above, near)


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, (x / scale.float()).round(), 0)


def _grouped(x: torch.Tensor, rows: int, channels: int) -> torch.Tensor:
    """[..., R, H, D] as [..., groups, rows, H, groups, channels]; the last row is repeated to fill the last group."""
    *batch, count, heads, size = x.shape
    if missing := -count % rows:
        x = torch.cat((x, x[..., -1:, :, :].expand(*batch, missing, heads, size)), dim=-3)
    return x.reshape(*batch, (count + missing) // rows, rows, heads, size // channels, channels)


def _ungrouped(codes: torch.Tensor, count: int) -> torch.Tensor:
    *batch, groups, rows, heads, parts, channels = codes.shape
    return codes.reshape(*batch, groups * rows, heads, parts * channels)[..., :count, :, :]
