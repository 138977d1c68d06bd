"""Chunked RoPE against the rotary modules of vLLM and transformers, every kind of scaling we claim.

Errors are measured per pair of channels, as complex numbers in float64, relative to the pair's length. ``unit`` is the
relative error of one rounding to the keys' dtype; each bound is the number of roundings that happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_mem.errors import InputError, UnsupportedModelError
from inferscale_mem.kv.rope import RopeTable, kernel_rounds, rotate, unrotate

POSITIONS = 1024
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FLOAT32_STEPS = 8
"""Roundings that a rotation and its inverse take in float32, to be added where the result is float32."""


def as_complex(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """[..., D] -> [..., rotary_dim // 2] complex128, one number per pair."""
    half = table.rotary_dim // 2
    rotated = x[..., : table.rotary_dim].double()
    shape = (2, half) if table.is_neox_style else (half, 2)
    parts = rotated.unflatten(-1, shape).movedim(-2 if table.is_neox_style else -1, 0)
    return torch.complex(parts[0].contiguous(), parts[1].contiguous())


def factors(table: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """[T, 1, rotary_dim // 2] complex128: what keys [.., T, H, D] are multiplied by."""
    return torch.complex(table.cos[positions].double(), table.sin[positions].double())[:, None]


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error of a pair, relative to its exact length."""
    return float(((got - exact).abs() / exact.abs()).max())


def random_keys(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_positions(count: int, table: RopeTable, seed: int = 0) -> torch.Tensor:
    """Random ones, with the first and the last."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, table.max_positions, (count,), generator=generator)
    picked[0], picked[1] = 0, table.max_positions - 1
    return picked


# vLLM.


@dataclass(frozen=True)
class Variant:
    """How to make a rotary module with vLLM's get_rope."""

    name: str
    parameters: dict[str, Any]
    neox: bool = True
    head_size: int = 64
    max_position: int = POSITIONS

    def __str__(self) -> str:
        return self.name


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 9 for i in range(32)],
    "long_factor": [2.0 + i for i in range(32)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
VARIANTS = [
    Variant("default", {}),
    Variant("interleaved", {}, neox=False),
    Variant("partial", {"partial_rotary_factor": 0.4}, head_size=80),
    Variant("partial_interleaved", {"partial_rotary_factor": 0.5}, neox=False),
    Variant("llama3", LLAMA3),
    Variant("yarn", YARN),
    Variant("yarn_interleaved", YARN | {"attention_factor": 0.7}, neox=False),
    Variant("linear", {"rope_type": "linear", "factor": 4.0}, max_position=POSITIONS // 4),
    Variant("dynamic_factor", {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 256}),
    Variant("dynamic_alpha", {"rope_type": "dynamic", "alpha": 1000.0}),
    Variant("ntk", {"rope_type": "ntk", "factor": 2.0}),
    Variant("proportional", {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
]
LONGROPE = [
    Variant("longrope_short", LONG | {"original_max_position_embeddings": POSITIONS}, max_position=4 * POSITIONS),
    Variant("longrope_long", LONG | {"original_max_position_embeddings": POSITIONS // 4}),
    Variant("longrope_partial", LONG | {"original_max_position_embeddings": POSITIONS, "rope_dim": 64}, head_size=80),
]
WITHOUT_KERNEL = [Variant("odd_head", {}, head_size=24), *LONGROPE]
"""vLLM's CPU kernel does not do longrope, and crashes on 12 pairs."""
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
MakeRope = Callable[..., Any]


@pytest.fixture
def make_rope(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRope]:
    """get_rope inside a vLLM configuration of POSITIONS tokens; fresh modules for every test."""
    config = pytest.importorskip("vllm.config")
    package = pytest.importorskip("vllm.model_executor.layers.rotary_embedding")
    monkeypatch.setattr(package, "_ROPE_DICT", {})
    settings_ = config.VllmConfig()
    settings_.model_config = SimpleNamespace(max_model_len=POSITIONS)

    def make(variant: Variant, dtype: torch.dtype) -> Any:
        parameters = {"rope_type": "default", "rope_theta": 10000.0} | variant.parameters
        return package.get_rope(variant.head_size, variant.max_position, variant.neox, parameters, dtype=dtype)

    with config.set_current_vllm_config(settings_):
        yield make


def by_kernel(module: Any, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """keys [T, H, D] as vLLM's CPU kernel turns them."""
    flat = keys.reshape(len(keys), -1).clone()
    module.forward_cpu(positions, torch.zeros_like(flat), flat)
    return flat.view(keys.shape)


def kernel_cuts(table: RopeTable) -> bool:
    """Whether vLLM's kernel for this processor cuts bits off instead of rounding."""
    ops = pytest.importorskip("vllm._custom_ops")
    halves = table.is_neox_style and table.dtype == torch.bfloat16
    return halves and not kernel_rounds(ops.rotary_embedding, table.dtype, torch.device("cpu"))


def as_by_kernel(keys: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """What ``rotate`` gives, cut off instead of rounded where this processor's kernel does so."""
    if not kernel_cuts(table):
        return rotate(keys, positions, table)
    kept = torch.tensor(-1 << 16, dtype=torch.int32)
    return (rotate(keys.float(), positions, table).view(torch.int32) & kept).view(torch.float32).to(keys.dtype)


def by_torch(module: Any, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """keys [T, H, D] as vLLM's torch code turns them, eagerly: rounded after every operation."""
    flat = keys.reshape(len(keys), -1).clone()
    forward = getattr(module, "forward_native", module.forward)
    return forward(positions, torch.zeros_like(flat), flat)[1].view(keys.shape)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@BOTH_DTYPES
def test_rotates_as_vllm_s_kernel(variant: Variant, dtype: torch.dtype, make_rope: MakeRope) -> None:
    module = make_rope(variant, dtype)
    table = RopeTable.from_module(module, dtype=dtype, max_positions=POSITIONS)
    positions, keys = some_positions(60, table), random_keys(60, 3, variant.head_size, dtype=dtype)
    got, expected = as_by_kernel(keys, positions, table), by_kernel(module, positions, keys)
    assert table.is_neox_style == variant.neox
    if dtype == torch.bfloat16 or not variant.neox:
        assert torch.equal(got, expected)
    assert torch.equal(got[..., table.rotary_dim :], keys[..., table.rotary_dim :])
    assert worst(as_complex(got, table), as_complex(expected, table)) <= 4 * UNITS[torch.float32]


@pytest.mark.parametrize("variant", [*VARIANTS, *WITHOUT_KERNEL], ids=str)
@BOTH_DTYPES
def test_rotates_as_vllm_s_torch_code(variant: Variant, dtype: torch.dtype, make_rope: MakeRope) -> None:
    module = make_rope(variant, dtype)
    table = RopeTable.from_module(module, dtype=dtype, max_positions=POSITIONS)
    positions, keys = some_positions(60, table), random_keys(60, 3, variant.head_size, dtype=dtype)
    got, expected = rotate(keys, positions, table), by_torch(module, positions, keys)
    # Products and sum of theirs, and our one rounding.
    bound = (2**0.5 + 2) * 1.01 * UNITS[dtype]
    assert worst(as_complex(expected, table), as_complex(got, table)) <= bound
    assert torch.equal(got[..., table.rotary_dim :], expected[..., table.rotary_dim :])


@pytest.mark.parametrize("variant", [*VARIANTS, *WITHOUT_KERNEL], ids=str)
@BOTH_DTYPES
def test_undoes_vllm_s_rotation(variant: Variant, dtype: torch.dtype, make_rope: MakeRope) -> None:
    module = make_rope(variant, dtype)
    table = RopeTable.from_module(module, dtype=dtype, max_positions=POSITIONS)
    positions, keys = some_positions(200, table), random_keys(200, 3, variant.head_size, dtype=dtype)
    has_kernel = variant in VARIANTS
    turned = (by_kernel if has_kernel else by_torch)(module, positions, keys)
    roundings = 2**0.5 + 1 if not has_kernel else 2 if kernel_cuts(table) else 1
    bound = roundings * 1.01 * UNITS[dtype] + FLOAT32_STEPS * UNITS[torch.float32]
    back = unrotate(turned, positions, table, dtype=torch.float32)
    assert worst(as_complex(back, table), as_complex(keys, table)) <= bound
    assert torch.equal(back[..., table.rotary_dim :], keys[..., table.rotary_dim :].float())

    # What a plain transpose of the rotation would give does not pass, except in float32 tables of length one.
    transposed = as_complex(turned, table) * factors(table, positions).conj()
    scaled = abs(float(table.cos[0, 0]) - 1) > 0.01
    assert (worst(transposed, as_complex(keys, table)) > bound) == (scaled or dtype == torch.bfloat16)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@BOTH_DTYPES
def test_moves_keys_to_where_vllm_would_put_them(variant: Variant, dtype: torch.dtype, make_rope: MakeRope) -> None:
    module = make_rope(variant, dtype)
    table = RopeTable.from_module(module, dtype=dtype, max_positions=POSITIONS)
    keys = random_keys(200, 3, variant.head_size, dtype=dtype)
    before, after = some_positions(200, table, seed=1), some_positions(200, table, seed=2).flip(0)
    stored = unrotate(by_kernel(module, before, keys), before, table)
    moved, expected = rotate(stored, after, table), by_kernel(module, after, keys)
    exact = as_complex(keys, table) * factors(table, after)
    # Ours is rounded three times (keys as served, as stored, as served again), theirs once; cutting off counts twice.
    extra, theirs = FLOAT32_STEPS * UNITS[torch.float32], 2 if kernel_cuts(table) else 1
    assert worst(as_complex(moved, table), exact) <= (2 + theirs) * 1.01 * UNITS[dtype] + extra
    assert float(((as_complex(moved, table) - as_complex(expected, table)).abs() / exact.abs()).max()) <= (
        (2 + 2 * theirs) * 1.01 * UNITS[dtype] + extra
    )


def test_how_many_bits_agree_after_storing_and_serving_again(make_rope: MakeRope) -> None:
    module = make_rope(VARIANTS[0], torch.bfloat16)
    table = RopeTable.from_module(module, dtype=torch.bfloat16, max_positions=POSITIONS)
    keys = random_keys(POSITIONS, 3, 64, dtype=torch.bfloat16)
    here, there = torch.arange(POSITIONS), torch.arange(POSITIONS).roll(317)
    if kernel_cuts(table):
        pytest.skip("vLLM's kernel for this processor does not round")
    served = by_kernel(module, here, keys)
    transposed = RopeTable(table.cos, -table.sin, table.is_neox_style, table.dtype)

    def agreeing(stored: torch.Tensor, positions: torch.Tensor) -> float:
        return float((rotate(stored, positions, table) == by_kernel(module, positions, keys)).float().mean())

    exact, plain = unrotate(served, here, table), rotate(served, here, transposed)
    assert agreeing(exact, here) > 0.95 > 0.85 > agreeing(plain, here)
    assert agreeing(exact, there) > 0.85 > 0.8 > agreeing(plain, there)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@BOTH_DTYPES
def test_vllm_s_kernel_can_do_the_work(neox: bool, in_place: bool, dtype: torch.dtype, make_rope: MakeRope) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    variant = Variant("partial", {"partial_rotary_factor": 0.5}, neox=neox, head_size=96)
    module = make_rope(variant, dtype)
    table = RopeTable.from_module(module, dtype=dtype, max_positions=POSITIONS)
    keys, positions = random_keys(3, 41, 2, 96, dtype=dtype), some_positions(41, table)
    expected = torch.stack([by_kernel(module, positions, layer) for layer in keys])
    out = keys if in_place else torch.full_like(keys, float("nan"))
    assert rotate(keys, positions, table, out, kernel=ops.rotary_embedding) is out
    assert torch.equal(out, expected)


def test_kernel_copes_with_nothing_and_with_strides(make_rope: MakeRope) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    table = RopeTable.from_module(make_rope(VARIANTS[0], torch.bfloat16), dtype=torch.bfloat16, max_positions=POSITIONS)
    nothing = torch.empty(2, 0, 3, 64, dtype=torch.bfloat16)
    assert rotate(nothing, torch.arange(0), table, kernel=ops.rotary_embedding).shape == nothing.shape
    strided = random_keys(9, 2, 3, 64, dtype=torch.bfloat16).transpose(0, 1)
    positions = torch.arange(9)
    assert torch.equal(
        rotate(strided, positions, table, kernel=ops.rotary_embedding), as_by_kernel(strided, positions, table)
    )


def test_kernel_refuses_what_it_would_get_wrong(make_rope: MakeRope) -> None:
    table = RopeTable.from_module(make_rope(VARIANTS[0], torch.bfloat16), dtype=torch.bfloat16, max_positions=POSITIONS)
    keys, positions = random_keys(5, 3, 64, dtype=torch.bfloat16), torch.arange(5)

    def kernel(*_: object) -> None:
        raise AssertionError("must not be called")

    with pytest.raises(InputError, match="one dtype"):
        rotate(keys.float(), positions, table, kernel=kernel)
    with pytest.raises(InputError, match="one dtype"):
        rotate(keys, positions, table, torch.empty(5, 3, 64), kernel=kernel)
    odd, five = random_table(24), random_keys(5, 3, 24)
    assert table.kernel_safe and not odd.kernel_safe
    with pytest.raises(InputError, match="12 pairs"):
        rotate(five, positions, odd, kernel=kernel)
    with pytest.raises(InputError, match="contiguous"):
        rotate(keys, positions, table, torch.empty(3, 5, 64, dtype=keys.dtype).transpose(0, 1), kernel=kernel)


def test_table_is_rounded_to_the_dtype_of_the_keys(make_rope: MakeRope) -> None:
    module = make_rope(VARIANTS[0], torch.float32)
    table = RopeTable.from_module(module, dtype=torch.bfloat16, max_positions=POSITIONS)
    positions, keys = some_positions(60, table), random_keys(60, 3, 64, dtype=torch.bfloat16)
    assert table.dtype == table.cos_sin_cache.dtype == torch.bfloat16
    assert torch.equal(as_by_kernel(keys, positions, table), by_kernel(module, positions, keys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_does_not_round_is_told(dtype: torch.dtype) -> None:
    def kernel(positions: torch.Tensor, keys: torch.Tensor, _: None, size: int, cache: torch.Tensor, *__: bool) -> None:
        cos, sin = (part[:, None] for part in cache.float()[positions].chunk(2, dim=-1))
        first, second = keys.view(len(keys), -1, size).float().chunk(2, dim=-1)
        exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rounded = exact.to(dtype)
        too_long = cut & (rounded.abs() > exact.abs())
        keys.copy_((rounded.view(torch.int16) - too_long.to(torch.int16)).view(dtype).view(keys.shape))

    for cut in (False, True):
        assert kernel_rounds(kernel, dtype, torch.device("cpu")) is not cut


def test_table_is_a_copy_of_the_part_asked_for(make_rope: MakeRope) -> None:
    module = make_rope(VARIANTS[0], torch.float32)
    table = RopeTable.from_module(module, dtype=torch.float32, max_positions=100)
    assert (table.max_positions, table.rotary_dim) == (100, 64)
    assert torch.equal(table.cos_sin_cache, module.cos_sin_cache[:100])
    module.cos_sin_cache.zero_()
    assert float(table.cos.abs().max()) == 1


def test_table_of_the_plain_formula(make_rope: MakeRope) -> None:
    table = RopeTable.from_module(make_rope(VARIANTS[0], torch.float32), dtype=torch.float32, max_positions=POSITIONS)
    frequencies = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    exact = torch.polar(torch.ones(POSITIONS, 32, dtype=torch.float64), torch.arange(POSITIONS)[:, None] * frequencies)
    # Angles of up to 1023 in float32.
    assert worst(factors(table, torch.arange(POSITIONS))[:, 0], exact) < POSITIONS * 2.0**-23


# transformers.

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": POSITIONS}


@dataclass(frozen=True)
class Model:
    """A rotary module of transformers: model name, its classes' prefix, and settings."""

    name: str
    prefix: str
    settings: dict[str, Any]
    layer_type: str | None = None
    neox: bool = True


def scaled(name: str, scaling: dict[str, Any], **changes: Any) -> Model:
    return Model(
        "llama", "Llama", SMALL | changes | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": name} | scaling}
    )


GEMMA = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 6}
MODELS = [
    scaled("default", {}),
    scaled("llama3", LLAMA3),
    scaled("yarn", YARN),
    scaled("linear", {"factor": 4.0}),
    scaled("dynamic", {"factor": 4.0}),
    scaled(
        "longrope",
        {"short_factor": [1.0 + i / 9 for i in range(16)], "long_factor": [3.0] * 16, "factor": 4.0}
        | {"original_max_position_embeddings": POSITIONS},
        max_position_embeddings=4 * POSITIONS,
    ),
    Model("phi", "Phi", SMALL | {"partial_rotary_factor": 0.5}),
    Model("glm4", "Glm4", SMALL | {"head_dim": 32}, neox=False),
    Model("cohere", "Cohere", SMALL, neox=False),
    Model("gpt_oss", "GptOss", SMALL | {"head_dim": 32}),
    Model("gemma3", "Gemma3", GEMMA, layer_type="sliding_attention"),
    Model("gemma3", "Gemma3", GEMMA, layer_type="full_attention"),
]


def model_id(model: Model) -> str:
    return "-".join(
        filter(None, [model.name, model.settings.get("rope_parameters", {}).get("rope_type"), model.layer_type])
    )


def make_module(model: Model) -> Any:
    """The rotary module of a tiny model."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    file = __import__(f"transformers.models.{model.name}.modeling_{model.name}", fromlist=["*"])
    config = getattr(file, f"{model.prefix}TextConfig", None) or getattr(file, f"{model.prefix}Config")
    return getattr(file, f"{model.prefix}RotaryEmbedding")(config(**model.settings))


def by_model_file(module: Any, positions: torch.Tensor, keys: torch.Tensor, options: dict[str, str]) -> torch.Tensor:
    """keys [T, H, rotary_dim] as the model's own code turns them."""
    cos, sin = module(keys, positions[None], **options)
    heads_first = keys.transpose(0, 1)[None]
    _, turned = sys.modules[type(module).__module__].apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    return turned[0].transpose(0, 1)


@pytest.mark.parametrize("model", MODELS, ids=model_id)
@BOTH_DTYPES
def test_rotates_as_transformers(model: Model, dtype: torch.dtype) -> None:
    module = make_module(model)
    options = {"layer_type": model.layer_type} if model.layer_type else {}
    table = RopeTable.from_module(module, dtype=dtype, max_positions=POSITIONS, **options)
    assert table.is_neox_style == model.neox and table.dtype == dtype
    positions, keys = some_positions(100, table), random_keys(100, 3, table.rotary_dim, dtype=dtype)
    turned = by_model_file(module, positions, keys, options)
    exact = as_complex(keys, table) * factors(table, positions)
    rounding = 1.01 * UNITS[dtype]
    assert worst(as_complex(rotate(keys, positions, table), table), exact) <= rounding + 3 * UNITS[torch.float32]
    assert worst(as_complex(turned, table), exact) <= (2**0.5 + 1) * rounding
    back = unrotate(turned, positions, table, dtype=torch.float32)
    extra = FLOAT32_STEPS * UNITS[torch.float32]
    assert worst(as_complex(back, table), as_complex(keys, table)) <= (2**0.5 + 1) * rounding + extra


def test_partial_and_scaled_modules_are_read_as_such() -> None:
    phi = RopeTable.from_module(make_module(MODELS[6]), dtype=torch.float32, max_positions=8)
    yarn = RopeTable.from_module(make_module(MODELS[2]), dtype=torch.float32, max_positions=8)
    assert phi.rotary_dim == 16
    assert float(yarn.cos[0, 0]) == pytest.approx(1.1386, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("default", {}), ("llama3", LLAMA3), ("yarn", YARN), ("linear", {"factor": 4.0})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_vllm_and_transformers_agree(kind: str, parameters: dict[str, Any], make_rope: MakeRope) -> None:
    rows = POSITIONS if kind in ("default", "llama3") else POSITIONS // 4
    variant = Variant(kind, {"rope_type": kind} | parameters, head_size=32, max_position=rows)
    theirs = RopeTable.from_module(make_module(scaled(kind, parameters)), dtype=torch.float32, max_positions=POSITIONS)
    ours = RopeTable.from_module(make_rope(variant, torch.float32), dtype=torch.float32, max_positions=POSITIONS)
    every = torch.arange(POSITIONS)
    assert worst(factors(ours, every), factors(theirs, every)) < POSITIONS * 2.0**-22


# Refusals.


def refusal(module: Any, max_positions: int = 64, **options: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        RopeTable.from_module(module, dtype=torch.float32, max_positions=max_positions, **options)
    assert caught.value.model == type(module).__name__
    assert len(caught.value.reasons) == 1
    return caught.value.reasons[0]


@pytest.mark.filterwarnings("ignore:Casting complex values")  # vLLM makes the vision table so
@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"mrope_section": [8, 12, 12]}, "mRoPE"),
        (YARN | {"mrope_section": [8, 12, 12]}, "mRoPE"),
        (
            {"use_fope": True, "num_key_value_heads": 2, "num_inv_freq": None, "fope_sep_head": True}
            | {"fope_init_factor": 0.1},
            "FoPE",
        ),
        (YARN | {"rope_type": "deepseek_yarn"}, "MLA"),
        ({"rope_type": "mllama4"}, "not a table"),
    ],
    ids=["mrope", "mrope_yarn", "fope", "mla", "vision"],
)
def test_refuses_other_rotations_of_vllm(parameters: dict[str, Any], reason: str, make_rope: MakeRope) -> None:
    assert reason in refusal(make_rope(Variant("", parameters, max_position=64), torch.float32))


def test_refuses_dual_chunks() -> None:
    package = pytest.importorskip("vllm.model_executor.layers.rotary_embedding")
    module = package.DualChunkRotaryEmbedding.__new__(package.DualChunkRotaryEmbedding)  # its constructor wants a GPU
    torch.nn.Module.__init__(module)
    assert "dual chunk" in refusal(module)


def test_refuses_a_module_that_does_not_follow_its_table(make_rope: MakeRope) -> None:
    module = make_rope(VARIANTS[0], torch.float32)
    honest = module.forward_native

    def backwards(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        return honest(POSITIONS - 1 - positions, query, key)

    module.forward_native = backwards
    assert "own table" in refusal(module)


def test_refuses_more_positions_than_there_are(make_rope: MakeRope) -> None:
    assert "1024 positions, 1025" in refusal(make_rope(VARIANTS[0], torch.float32), max_positions=1025)
    assert "1024 positions, 1025" in refusal(make_rope(LONGROPE[0], torch.float32), max_positions=1025)
    with pytest.raises(InputError, match="at least 1"):
        RopeTable.from_module(make_rope(VARIANTS[0], torch.float32), dtype=torch.float32, max_positions=0)


def test_refuses_a_style_the_module_does_not_have(make_rope: MakeRope) -> None:
    assert "is_neox_style=False" in refusal(make_rope(VARIANTS[0], torch.float32), is_neox_style=False)
    assert "is_neox_style=False" in refusal(make_module(MODELS[0]), is_neox_style=False)


@pytest.mark.parametrize(
    "model",
    [
        MODELS[4],
        scaled(
            "longrope",
            {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": POSITIONS},
            max_position_embeddings=4 * POSITIONS,
        ),
    ],
    ids=model_id,
)
def test_refuses_to_serve_past_where_a_rotation_starts_to_grow(model: Model) -> None:
    module = make_module(model)
    RopeTable.from_module(module, dtype=torch.float32, max_positions=POSITIONS)
    assert f"over {POSITIONS} tokens" in refusal(module, max_positions=POSITIONS + 1)


def test_refuses_a_rotation_that_has_grown() -> None:
    module = make_module(MODELS[4])
    module(torch.zeros(1), torch.arange(POSITIONS + 9)[None])
    assert f"over {POSITIONS} tokens" in refusal(module)


def test_asks_for_what_a_module_leaves_open() -> None:
    gemma = make_module(MODELS[-1])
    assert "sliding_attention" in refusal(gemma)
    assert "sliding_attention" in refusal(gemma, layer_type="global")
    module = make_module(MODELS[0])
    elsewhere = type("LoneRotaryEmbedding", (type(module),), {"__module__": __name__})
    module.__class__ = elsewhere
    assert "pass is_neox_style" in refusal(module)
    for style in (True, False):
        table = RopeTable.from_module(module, dtype=torch.float32, max_positions=64, is_neox_style=style)
        assert table.is_neox_style == style and table.rotary_dim == 32


def test_refuses_what_it_does_not_know() -> None:
    assert "not known" in refusal(torch.nn.Linear(2, 2))
    assert "no known layout" in refusal(make_module(Model("nanochat", "NanoChat", SMALL)))  # turns the other way
    assert "(cos, sin)" in refusal(make_module(Model("llama4", "Llama4Text", SMALL | {"head_dim": 32})))


# The functions themselves.


def random_table(rotary_dim: int, neox: bool = True, positions: int = 50, seed: int = 0) -> RopeTable:
    """Any rotation, of lengths from 0.5 to 2."""
    angle, length = torch.rand(2, positions, rotary_dim // 2, generator=torch.Generator().manual_seed(seed))
    length = 0.5 + 1.5 * length
    return RopeTable(length * (6.3 * angle).cos(), length * (6.3 * angle).sin(), neox, torch.float32)


@settings(max_examples=80, deadline=None)
@given(
    layers=st.none() | st.integers(0, 3),
    tokens=st.integers(0, 7),
    heads=st.integers(1, 3),
    half=st.integers(1, 6),
    passed=st.integers(0, 3),
    neox=st.booleans(),
    dtype=st.sampled_from(list(UNITS)),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_unrotate_undoes_rotate(
    layers: int | None,
    tokens: int,
    heads: int,
    half: int,
    passed: int,
    neox: bool,
    dtype: torch.dtype,
    strided: bool,
    seed: int,
) -> None:
    table = random_table(2 * half, neox, seed=seed)
    shape = ([] if layers is None else [layers]) + [tokens, heads, 2 * half + passed]
    keys = (
        random_keys(*shape[:-1], 2 * shape[-1], dtype=dtype, seed=seed)[..., ::2]
        if strided
        else random_keys(*shape, dtype=dtype, seed=seed)
    )
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    out = torch.full(shape, float("nan"), dtype=dtype)
    turned = rotate(keys, positions, table, out)
    back = unrotate(turned, positions, table)
    assert turned is out and back.dtype == dtype and list(back.shape) == shape
    assert torch.equal(back[..., 2 * half :], keys[..., 2 * half :])
    exact = as_complex(keys, table)
    # float16 has too small a range below for a bound relative to every pair: leave out what is near its subnormals.
    error = (as_complex(back, table) - exact).abs()
    bound = (2 * 1.01 * UNITS[dtype] + FLOAT32_STEPS * UNITS[torch.float32]) * exact.abs()
    assert (error <= bound + (2.0**-23 if dtype == torch.float16 else 0)).all()


@pytest.mark.parametrize("function", [rotate, unrotate])
def test_layers_are_turned_alike_and_keys_left_alone(function: Callable[..., torch.Tensor]) -> None:
    table, keys, positions = random_table(8), random_keys(3, 5, 2, 10), torch.tensor([4, 0, 49, 4, 7])
    before = keys.clone()
    together = function(keys, positions, table)
    assert torch.equal(together, torch.stack([function(layer, positions, table) for layer in keys]))
    assert torch.equal(keys, before)


def test_rotates_in_place_and_across_dtypes() -> None:
    table, keys, positions = random_table(8), random_keys(3, 5, 2, 10), torch.arange(5)
    expected = rotate(keys, positions, table)
    half = torch.full(keys.shape, float("nan"), dtype=torch.bfloat16)
    assert torch.equal(rotate(keys, positions, table, half), expected.to(torch.bfloat16))
    assert rotate(keys, positions, table, keys) is keys
    assert torch.equal(keys, expected)


def test_layers_without_rotation_keep_their_keys() -> None:
    keys, positions = random_keys(2, 4, 1, 6), torch.arange(4)
    out = torch.full_like(keys, float("nan"))
    assert rotate(keys, positions, None, out) is out
    assert torch.equal(out, keys)
    stored = unrotate(keys, positions, None, dtype=torch.bfloat16)
    assert torch.equal(stored, keys.to(torch.bfloat16))
    assert unrotate(keys, positions, None).data_ptr() != keys.data_ptr()


@pytest.mark.parametrize("function", [rotate, unrotate])
@pytest.mark.parametrize(
    ("keys", "positions", "message"),
    [
        (torch.ones(4, 8), torch.arange(4), "keys must be"),
        (torch.ones(1, 1, 4, 1, 8), torch.arange(4), "keys must be"),
        (torch.ones(4, 1, 8, dtype=torch.int32), torch.arange(4), "keys must be"),
        (torch.ones(4, 1, 8), torch.arange(3), "one per token"),
        (torch.ones(4, 1, 8), torch.arange(4)[None], "one per token"),
        (torch.ones(4, 1, 8), torch.arange(4, dtype=torch.int32), "int64"),
        (torch.ones(4, 1, 6), torch.arange(4), "smaller than the 8 channels"),
        (torch.ones(4, 1, 8), torch.tensor([0, 1, 2, 50]), "Positions 0 to 50 .* 0 to 49"),
        (torch.ones(4, 1, 8), torch.tensor([0, 1, 2, -1]), "Positions -1 to 2"),
        (torch.ones(4, 1, 8, device="meta"), torch.arange(4), "one device"),
    ],
)
def test_refuses_bad_input(
    function: Callable[..., torch.Tensor], keys: torch.Tensor, positions: torch.Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        function(keys, positions, random_table(8))


def test_refuses_a_bad_out() -> None:
    keys, positions, table = torch.ones(4, 1, 8), torch.arange(4), random_table(8)
    for out in (torch.ones(3, 1, 8), torch.ones(4, 1, 8, dtype=torch.int8), torch.ones(4, 1, 8, device="meta")):
        with pytest.raises(InputError, match="out must be"):
            rotate(keys, positions, table, out)
    with pytest.raises(InputError, match="out must be"):
        unrotate(keys, positions, table, dtype=torch.int8)


def test_refuses_a_bad_table() -> None:
    good = torch.ones(4, 2)
    for cos, sin in ((good, torch.ones(4, 3)), (torch.ones(4), torch.ones(4)), (torch.ones(0, 2), torch.ones(0, 2))):
        with pytest.raises(InputError, match="positions, pairs"):
            RopeTable(cos, sin, True, torch.float32)
    with pytest.raises(InputError, match="float32"):
        RopeTable(good.double(), good.double(), True, torch.float32)
    for broken in (0.0, float("nan"), float("inf")):
        cos, sin = good.clone(), good.clone()
        cos[2, 1] = sin[2, 1] = broken
        with pytest.raises(InputError, match="cannot be undone"):
            RopeTable(cos, sin, True, torch.float32)
