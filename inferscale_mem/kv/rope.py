"""Chunked RoPE: keys are stored before rotation, and rotated to the positions they get in a prompt.

The rotation is the engine's own: its table of cosines and sines is read from its module, in its precision. Undoing it
is exact, see ``unrotate``. (InferScale, arXiv:2607.27090, calls this Chunked RoPE.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from inferscale_mem.errors import InputError
from inferscale_mem.kernels.rope import cpu, reference
from inferscale_mem.kv.rope_modules import read_rotary

RotaryKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, torch.Tensor, bool], object]
"""(positions [N] int64, query [N, H * D], key or None, head_size D, cos_sin_cache [P, R], is_neox_style): rotates
``query`` in place. The signature of vLLM's ``_custom_ops.rotary_embedding``."""


@dataclass(frozen=True, eq=False)
class RopeTable:
    """What a layer multiplies its keys by, at every position. Compared and hashed by identity.

    A layer that does not rotate at all (NoPE) has no table: pass None where a table is taken.

    Attributes:
        cos: [max_positions, rotary_dim // 2] float32; values as the engine has them, so rounded to ``dtype``, and
            scaled where the model scales (YaRN, longrope).
        sin: the same.
        is_neox_style: channel i of a head is rotated against channel rotary_dim // 2 + i; otherwise 2i against 2i + 1.
        dtype: in which the engine keeps its cosines and sines.

    Raises:
        InputError: shapes or dtypes are not these, or the rotation of some position cannot be undone.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox_style: bool
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.cos.dim() != 2 or self.cos.shape != self.sin.shape or self.cos.numel() == 0:
            raise InputError(f"cos and sin must be [positions, pairs]; got {_shape(self.cos)} and {_shape(self.sin)}.")
        if self.cos.dtype != torch.float32 or self.sin.dtype != torch.float32:
            raise InputError(f"cos and sin must be float32; got {self.cos.dtype} and {self.sin.dtype}.")
        length = self.cos.square() + self.sin.square()
        if not bool(torch.isfinite(length).all()) or float(length.min()) <= 0:
            raise InputError("The rotary table holds a rotation of length zero or not finite; it cannot be undone.")

    @classmethod
    def from_module(
        cls,
        rotary: torch.nn.Module,
        *,
        dtype: torch.dtype,
        max_positions: int,
        is_neox_style: bool | None = None,
        layer_type: str | None = None,
    ) -> RopeTable:
        """Read the table out of an engine's own rotary module; see ``rope_modules`` for which are known.

        Args:
            rotary: a vLLM or Hugging Face module, on the device the engine runs on (the table will be there too).
            dtype: of the model's keys.
            max_positions: positions the engine serves: its ``max_model_len``.
            is_neox_style: only for Hugging Face modules whose model file does not show how pairs are laid out.
            layer_type: only for Hugging Face modules that hold one rotation per layer type (Gemma 3).

        Raises:
            UnsupportedModelError: the module's rotation is not known to be movable; ``model`` is the module's class,
                ``reasons`` say what was found.
            InputError: max_positions is not positive.
        """
        if max_positions < 1:
            raise InputError(f"max_positions must be at least 1, not {max_positions}.")
        cos, sin, neox, kept = read_rotary(
            rotary, dtype=dtype, max_positions=max_positions, is_neox_style=is_neox_style, layer_type=layer_type
        )
        return cls(cos, sin, neox, kept)

    @property
    def rotary_dim(self) -> int:
        """How many leading channels of a head are rotated."""
        return 2 * int(self.cos.shape[1])

    @property
    def max_positions(self) -> int:
        """Positions 0 to max_positions - 1 can be asked for."""
        return int(self.cos.shape[0])

    @property
    def kernel_safe(self) -> bool:
        """Whether a ``RotaryKernel`` may do the work: the number of pairs is a multiple of 8, as in all usual models.

        vLLM 0.32's CPU kernel ends the process with a segmentation fault on others (seen: bfloat16, 10 and 12 pairs).
        """
        return int(self.cos.shape[1]) % 8 == 0

    @cached_property
    def cos_sin_cache(self) -> torch.Tensor:
        """[max_positions, rotary_dim] in ``dtype``: cosines, then sines, as engines' rotary kernels take them."""
        return torch.cat((self.cos, self.sin), dim=-1).to(self.dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [T, rotary_dim // 2] float32 each, of positions [T]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(
    keys: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable | None,
    out: torch.Tensor | None = None,
    *,
    kernel: RotaryKernel | None = None,
) -> torch.Tensor:
    """Rotate keys to positions, as the engine does.

    Each element is computed in float32 and rounded once. In bfloat16 and float16 that equals vLLM's CPU kernel (but see
    ``kernel_rounds``) and its compiled forward bit for bit. In float32 it equals the compiled forward; the CPU kernel
    fuses multiply and add where pairs are halves, so that one element in four differs in its last bits. Eager torch
    forwards, which round to bfloat16 after every operation, agree in two elements of three.

    Fastest is the engine's own kernel, about four times as fast as this module's loop on a CPU: pass vLLM's
    ``_custom_ops.rotary_embedding`` as ``kernel``, and ``out=keys`` where the keys may be overwritten. It needs keys,
    out and table in one dtype, ``out`` contiguous, and ``table.kernel_safe``.

    Args:
        keys: [T, H, D] or [L, T, H, D] (all layers share the positions), any float dtype, any strides.
        positions: [T] int64. Checked against the table on the CPU; on other devices that is up to the caller.
        table: the layers' table; None leaves keys as they are.
        out: of the shape and device of ``keys``, any float dtype; may be ``keys`` itself, but not overlap it otherwise.
        kernel: does the work in place of this module's.

    Returns:
        ``out``, or a new contiguous tensor of the keys' dtype.

    Raises:
        InputError: shapes, dtypes, devices or positions do not fit.
    """
    _check(keys, positions, table)
    if out is None:
        out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    _check_out(out, keys)
    if table is None:
        return out.copy_(keys)
    if kernel is not None:
        return _rotate_by(kernel, keys, positions, table, out)
    cos, sin = table.at(positions)
    return _turn(keys, cos, sin, table.is_neox_style, out)


def kernel_rounds(kernel: RotaryKernel, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an engine's kernel gives what ``rotate`` gives in a 16-bit dtype.

    vLLM 0.32's for processors that have AVX2 and no AVX512 cuts off what does not fit into bfloat16 where pairs are
    halves. Keys that are stored and served again would become a little shorter each time.
    """
    keys = torch.linspace(-1, 1, 16 * 32, device=device).view(16, 1, 32).to(dtype)
    positions = torch.arange(16, device=device)
    angles = torch.outer(positions.float(), 0.5 ** torch.arange(16, device=device))
    table = RopeTable(angles.cos().to(dtype).float(), angles.sin().to(dtype).float(), True, dtype)
    return torch.equal(rotate(keys, positions, table, kernel=kernel), rotate(keys, positions, table))


def unrotate(
    keys: torch.Tensor, positions: torch.Tensor, table: RopeTable | None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Undo ``rotate``: the keys as they were before rotation.

    Exact up to rounding: divides by cos² + sin², which is not 1 in tables of bfloat16 or with a scaling factor.
    Computed in float32, rounded once.

    Args:
        keys: [T, H, D] or [L, T, H, D], rotated, any float dtype, any strides.
        positions: [T] int64: where the keys were rotated to. Checked as in ``rotate``.
        table: the layers' table; None leaves keys as they are.
        dtype: of the result; the keys' own if None.

    Returns:
        A new contiguous tensor of the keys' shape.

    Raises:
        InputError: shapes, dtypes, devices or positions do not fit.
    """
    _check(keys, positions, table)
    out = torch.empty(keys.shape, dtype=dtype or keys.dtype, device=keys.device)
    _check_out(out, keys)
    if table is None:
        return out.copy_(keys)
    cos, sin = reference.inverse(*table.at(positions))
    return _turn(keys, cos, sin, table.is_neox_style, out)


def _turn(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool, out: torch.Tensor
) -> torch.Tensor:
    if keys.device.type != "cpu":
        return out.copy_(reference.rotate(keys, cos, sin, is_neox_style))
    layers = keys.dim() == 4
    cpu.rotate_into(out if layers else out[None], keys if layers else keys[None], cos, sin, is_neox_style)
    return out


def _rotate_by(
    kernel: RotaryKernel, keys: torch.Tensor, positions: torch.Tensor, table: RopeTable, out: torch.Tensor
) -> torch.Tensor:
    if not keys.dtype == out.dtype == table.dtype:
        raise InputError(
            f"A rotary kernel needs one dtype; keys are {keys.dtype}, out {out.dtype}, the table {table.dtype}. "
            "Call rotate without kernel."
        )
    if not table.kernel_safe:
        raise InputError(f"{table.rotary_dim // 2} pairs crash rotary kernels; call rotate without kernel.")
    if not out.is_contiguous():
        raise InputError("A rotary kernel needs a contiguous out; call rotate without kernel.")
    if out is not keys:
        out.copy_(keys)
    if out.numel():
        heads, size = out.shape[-2:]
        layers = out.shape[0] if out.dim() == 4 else 1
        flat = out.view(-1, heads * size)
        kernel(positions.repeat(layers), flat, None, size, table.cos_sin_cache, table.is_neox_style)
    return out


def _check(keys: torch.Tensor, positions: torch.Tensor, table: RopeTable | None) -> None:
    if keys.dim() not in (3, 4) or not keys.is_floating_point():
        raise InputError(
            "keys must be floats of shape [tokens, heads, size] or [layers, tokens, heads, size]; "
            f"got {_shape(keys)}, {keys.dtype}."
        )
    if positions.dtype != torch.int64 or positions.shape != (keys.shape[-3],):
        raise InputError(
            f"positions must be int64, one per token of keys {_shape(keys)}; "
            f"got {_shape(positions)}, {positions.dtype}."
        )
    if table is None:
        return
    if keys.shape[-1] < table.rotary_dim:
        raise InputError(f"Heads of size {keys.shape[-1]} are smaller than the {table.rotary_dim} channels to rotate.")
    if not keys.device == positions.device == table.cos.device:
        raise InputError(
            f"keys are on {keys.device}, positions on {positions.device}, the table on {table.cos.device}; "
            "move them to one device."
        )
    if positions.device.type == "cpu" and positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= table.max_positions:
            raise InputError(f"Positions {low} to {high} asked for; the table has 0 to {table.max_positions - 1}.")


def _check_out(out: torch.Tensor, keys: torch.Tensor) -> None:
    if out.shape != keys.shape or out.device != keys.device or not out.is_floating_point():
        raise InputError(
            f"out must be floats of shape {_shape(keys)} on {keys.device}; "
            f"got {_shape(out)}, {out.dtype} on {out.device}."
        )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
