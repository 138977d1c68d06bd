"""Reading the rotation out of an engine's own rotary module, and refusing what cannot be read for certain.

Known are vLLM's modules with a ``cos_sin_cache`` or, for longrope, a ``long_short_cos_sin_cache``, and Hugging Face
modules that return (cos, sin) for position ids. No layout is guessed: what was read is compared with what the module
itself, or for Hugging Face the model file's own ``apply_rotary_pos_emb``, does to random keys.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from inferscale_mem.errors import UnsupportedModelError
from inferscale_mem.kernels.rope import reference

CHECKED_POSITIONS = 9
MODULE_TOLERANCE = 0.02
"""Relative; far above what rounding every operation to bfloat16 costs, far below what any wrong rotation does."""


class Rotary(NamedTuple):
    """What was read: cos and sin [max_positions, rotary_dim // 2] float32, style, and the engine's dtype for them."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox_style: bool
    dtype: torch.dtype


def read_rotary(
    rotary: torch.nn.Module,
    *,
    dtype: torch.dtype,
    max_positions: int,
    is_neox_style: bool | None = None,
    layer_type: str | None = None,
) -> Rotary:
    """The rotation a module does; arguments and errors as in ``RopeTable.from_module``."""
    _refuse_unmovable(rotary)
    with torch.no_grad():
        if hasattr(rotary, "cos_sin_cache"):
            read = _from_cache(rotary, dtype, max_positions)
        elif hasattr(rotary, "long_short_cos_sin_cache"):
            read = _from_longrope(rotary, max_positions)
        elif {"x", "position_ids"} <= inspect.signature(rotary.forward).parameters.keys():
            return _from_hugging_face(rotary, dtype, max_positions, is_neox_style, layer_type)
        else:
            _refuse(rotary, "its rotary module is of a kind that is not known here")
        if is_neox_style not in (None, read.is_neox_style):
            _refuse(rotary, f"is_neox_style={is_neox_style} was asked for, the module has {read.is_neox_style}")
        _compare_with_module(rotary, read, dtype)
    return read


def _refuse(rotary: torch.nn.Module, reason: str, cause: Exception | None = None) -> NoReturn:
    raise UnsupportedModelError(type(rotary).__name__, [f"{type(rotary).__name__}: {reason}"]) from cause


def _refuse_unmovable(rotary: torch.nn.Module) -> None:
    name = type(rotary).__name__
    config = getattr(rotary, "config", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if hasattr(rotary, "mrope_section") or "mrope_section" in scaling or "MRotary" in name:
        _refuse(rotary, "multimodal rotation (mRoPE) needs three positions per token")
    if "DualChunk" in name or hasattr(rotary, "cos_sin_k_cache"):
        _refuse(rotary, "dual chunk attention rotates one key in several ways")
    if "Fourier" in name or hasattr(rotary, "cos_coef"):
        _refuse(rotary, "Fourier rotation (FoPE) is learned per head")
    if "Deepseek" in name:
        _refuse(rotary, "multi-head latent attention (MLA) rotates a part of a compressed key")


# vLLM.


def _from_cache(rotary: torch.nn.Module, dtype: torch.dtype, max_positions: int) -> Rotary:
    # The engine casts its table to the query's dtype before use.
    return _split(rotary, _buffer(rotary, "cos_sin_cache").to(dtype), max_positions, bool(rotary.is_neox_style))


def _from_longrope(rotary: torch.nn.Module, max_positions: int) -> Rotary:
    # One table behind the other: short, of the original length, then long. Which one is fixed when the engine starts.
    cache = _buffer(rotary, "long_short_cos_sin_cache")
    original = _number(rotary, "original_max_position_embeddings")
    cache = cache[original:] if rotary.use_long_rope else cache[:original]
    return _split(rotary, cache, max_positions, True)


def _buffer(rotary: torch.nn.Module, name: str) -> torch.Tensor:
    cache = getattr(rotary, name)
    if not isinstance(cache, torch.Tensor) or cache.dim() != 2 or not cache.is_floating_point() or cache.is_meta:
        _refuse(rotary, f"its {name} is not a table of positions and channels")
    return cache


def _number(rotary: torch.nn.Module, name: str) -> int:
    value = getattr(rotary, name, None)
    if not isinstance(value, int):
        _refuse(rotary, f"its {name} is {value!r}, not a number")
    return value


def _split(rotary: torch.nn.Module, cache: torch.Tensor, max_positions: int, is_neox_style: bool) -> Rotary:
    rotary_dim = _number(rotary, "rotary_dim")
    if cache.shape[1] != rotary_dim:
        _refuse(rotary, f"its table is {cache.shape[1]} wide, its rotary_dim {rotary_dim}")
    if not 0 < max_positions <= cache.shape[0]:
        _refuse(rotary, f"it has {cache.shape[0]} positions, {max_positions} are asked for (max_model_len)")
    halves = cache[:max_positions].float().chunk(2, dim=-1)
    cos, sin = (half.clone(memory_format=torch.contiguous_format) for half in halves)
    return Rotary(cos, sin, is_neox_style, cache.dtype)


def _compare_with_module(rotary: torch.nn.Module, read: Rotary, dtype: torch.dtype) -> None:
    size = _number(rotary, "head_size")
    device = read.cos.device
    positions = torch.linspace(0, len(read.cos) - 1, CHECKED_POSITIONS, dtype=torch.float64).long().to(device)
    keys = _noise(CHECKED_POSITIONS, size).to(device, dtype)
    forward = getattr(rotary, "forward_native", rotary.forward)
    theirs = forward(positions, keys.clone(), keys.clone())[1].float()
    ours = reference.rotate(keys[:, None], read.cos[positions], read.sin[positions], read.is_neox_style)[:, 0]
    if not _close(ours, theirs, MODULE_TOLERANCE):
        _refuse(rotary, "it does not rotate keys by its own table")


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Whether every position's vector differs by at most this part of its length."""
    if ours.shape != theirs.shape:
        return False
    error = torch.linalg.vector_norm(ours - theirs, dim=-1)
    return bool((error <= tolerance * torch.linalg.vector_norm(ours, dim=-1)).all())


# Hugging Face.


def _from_hugging_face(
    rotary: torch.nn.Module, dtype: torch.dtype, max_positions: int, is_neox_style: bool | None, layer_type: str | None
) -> Rotary:
    options = _layer_options(rotary, layer_type)
    _refuse_growing(rotary, max_positions, layer_type)
    device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
    positions = torch.arange(max_positions, device=device)[None]
    made = rotary(torch.zeros(1, 1, 1, dtype=dtype, device=device), positions, **options)
    if not isinstance(made, tuple) or len(made) != 2 or any(part.dim() != 3 or part.shape[0] != 1 for part in made):
        _refuse(rotary, "it does not return (cos, sin) of one row per position")
    cos, sin = (part[0].to(torch.float32, copy=True) for part in made)
    layouts = [read for read in _layouts(cos, sin, made[0].dtype) if is_neox_style in (None, read.is_neox_style)]
    apply = _own_apply(rotary)
    if apply is not None:
        layouts = [read for read in layouts if _agrees(apply, cos, sin, read)]
    elif is_neox_style is None:
        _refuse(rotary, "its model file does not show how pairs of channels are laid out; pass is_neox_style")
    if not layouts:
        _refuse(rotary, f"its (cos, sin) fit no known layout of pairs (is_neox_style={is_neox_style})")
    return layouts[0]


def _layer_options(rotary: torch.nn.Module, layer_type: str | None) -> dict[str, str]:
    kinds = getattr(rotary, "rope_type", None)
    if not isinstance(kinds, dict):
        return {}
    if layer_type is None or layer_type not in kinds:
        _refuse(
            rotary, f"it has a rotation per layer type: {sorted(kinds)}; pass one as layer_type, not {layer_type!r}"
        )
    return {"layer_type": layer_type}


def _refuse_growing(rotary: Any, max_positions: int, layer_type: str | None) -> None:
    kinds = getattr(rotary, "rope_type", "default")
    kind = kinds[layer_type] if isinstance(kinds, dict) else kinds
    reach = max_positions
    if kind == "longrope":
        scaling = rotary.config.rope_parameters
        original = int(scaling.get(layer_type, scaling)["original_max_position_embeddings"])
    elif "dynamic" in kind:
        original = _number(rotary, "original_max_seq_len")
        reach = max(reach, int(rotary.max_seq_len_cached))  # it may have grown already
    else:
        return
    if reach > original:
        _refuse(
            rotary,
            f"with {kind} scaling its rotation changes when a request grows over {original} tokens, so keys cannot be "
            f"moved; serve at most {original} tokens (max_model_len)",
        )


def _layouts(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> list[Rotary]:
    """Every way to read (cos, sin) [P, W]: each pair's value twice (side by side, or half a width apart), or once."""
    width = cos.shape[-1]
    both = torch.stack((cos, sin))
    once = both
    if width % 2 == 0 and torch.equal(both[..., : width // 2], both[..., width // 2 :]):
        once = both[..., : width // 2]
    elif width % 2 == 0 and torch.equal(both[..., 0::2], both[..., 1::2]):
        once = both[..., 0::2]
    one_cos, one_sin = once.contiguous()
    return [Rotary(one_cos, one_sin, style, dtype) for style in (True, False)]


def _own_apply(rotary: torch.nn.Module) -> Callable[..., Any] | None:
    """The function of the module's own model file that applies (cos, sin) to keys, if there is exactly one."""
    file = sys.modules.get(type(rotary).__module__)
    if file is None or hasattr(file, "apply_rotary_pos_emb_interleave"):
        return None
    apply = getattr(file, "apply_rotary_pos_emb", None)
    return apply if callable(apply) else None


def _agrees(apply: Callable[..., Any], cos: torch.Tensor, sin: torch.Tensor, read: Rotary) -> bool:
    positions = torch.linspace(0, len(cos) - 1, CHECKED_POSITIONS, dtype=torch.float64).long().to(cos.device)
    keys = _noise(1, 1, CHECKED_POSITIONS, 2 * read.cos.shape[-1]).to(cos.device)
    names = inspect.signature(apply).parameters.keys()
    given = {"x": keys} if "x" in names else {"q": keys, "k": keys}
    try:
        theirs = apply(**given, cos=cos[None, positions], sin=sin[None, positions])
    except (RuntimeError, TypeError):  # another function's arguments, or channels that don't fit this layout
        return False
    theirs = theirs[1] if isinstance(theirs, tuple) else theirs
    ours = reference.rotate(keys[0].transpose(0, 1), read.cos[positions], read.sin[positions], read.is_neox_style)
    return _close(ours.transpose(0, 1)[None], theirs, 1e-4)
