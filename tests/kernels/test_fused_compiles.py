"""Triton's kernels compile for GPUs, here too where there is none, and move records 16 bytes at a time."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "step": "i32", "layers": "i32", "key_caches": "i64", "value_caches": "i64", "sample": "bf16", "angles": "bf16",
    "keys": "bf16", "key_scales": "bf16", "key_zeros": "bf16", "values": "bf16", "value_scales": "bf16",
    "value_zeros": "bf16",
}  # fmt: skip
NUMBERS = ("num_tokens", "num_layers", "null_block", "count")
MODEL = {
    "NUM_ROWS": 65536, "HEADS": 8, "SIZE": 128, "PADDED": 128, "KEY_BITS": 0, "KEY_SHARED": 1, "KEY_CHANNELS": 128,
    "VALUE_BITS": 0, "VALUE_SHARED": 1, "VALUE_CHANNELS": 128, "BLOCK_SIZE": 16, "BLOCK_STRIDE": 32768,
    "TOKEN_STRIDE": 2048, "HEAD_STRIDE": 256, "ALIGNED": 16, "ROTARY": 128, "NEOX": True, "RUN": 16,
}  # fmt: skip
PARTIAL = {"SIZE": 80, "ROTARY": 32, "BLOCK_STRIDE": 20480, "TOKEN_STRIDE": 1280, "HEAD_STRIDE": 160}


def accesses(kernel: Any, architecture: int, pointers: dict[str, str], numbers: dict[str, Any]) -> Counter[str]:
    """Global loads and stores of a kernel's machine code, by their widths ("ld v4.b32")."""
    names = kernel.fn.arg_names
    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(NUMBERS, "i32")
    source = ASTSource(
        fn=kernel.fn,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): number for name, number in numbers.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"enable_fp_fusion": False})
    found = re.findall(r"\b(ld|st)\.global\S*?\.((?:v\d\.)?b\d+)\b", compiled.asm["ptx"])
    return Counter(" ".join(access) for access in found)


INT4 = {"KEY_BITS": 4, "KEY_SHARED": 16, "KEY_CHANNELS": 1, "VALUE_BITS": 4}
INT8 = {"KEY_BITS": 8, "VALUE_BITS": 8}


def pointers_to(codes: str | None) -> dict[str, str]:
    if codes is None:
        return POINTERS
    scales = dict.fromkeys(("key_scales", "key_zeros", "value_scales", "value_zeros"), "fp16")
    return {**POINTERS, "keys": codes, "values": codes, **scales}


@pytest.mark.parametrize(
    "architecture, codes, changes",
    [
        (90, None, {}),
        (80, None, {}),
        (90, None, {"NEOX": False}),
        (90, None, PARTIAL),
        (90, "u8", INT4),
        (90, "i8", INT8),
    ],
    ids=["halves", "sm80", "interleaved", "partial", "int4", "int8"],
)
def test_inject_moves_16_bytes_at_a_time(architecture: int, codes: str | None, changes: dict[str, Any]) -> None:
    from inferscale_mem.kernels.inject.fused import _kernel

    found = accesses(_kernel, architecture, pointers_to(codes), {**MODEL, **changes, "ROWS": 32, "LAYERS": 1})
    assert found["st v4.b32"] and found["ld v4.b32"]
    assert [access for access in found if access.startswith("st")] == ["st v4.b32"]
    # Narrow ones fetch block tables and the like, and one scale per row.
    assert found["ld b8"] == 0 and found["ld b16"] <= (4 if codes else 0), found


@pytest.mark.parametrize(
    "codes, changes",
    [(None, {}), (None, {"NEOX": False}), ("i8", INT8), ("u8", {"KEY_BITS": 4, "VALUE_BITS": 4, "VALUE_CHANNELS": 32})],
    ids=["halves", "interleaved", "int8", "int4"],
)
def test_extract_moves_16_bytes_at_a_time(codes: str | None, changes: dict[str, Any]) -> None:
    from inferscale_mem.kernels.extract.fused import _kernel

    numbers = {**MODEL, **changes, "ROWS": 32, "LAYERS": 1}
    found = accesses(_kernel, 90, {**pointers_to(codes), "angles": "fp32"}, numbers)
    assert found["ld v4.b32"] and found["ld b8"] == found["ld b16"] == found["st b8"] == 0, found
    assert codes is not None or [access for access in found if access.startswith("st")] == ["st v4.b32"], found


def test_topk_reads_16_bytes_at_a_time() -> None:
    from inferscale_mem.kernels.topk.fused import _score

    pointers = {"embeddings": "fp32", "scopes": "i32", "queries": "fp32", "wanted": "i32", "keys": "i64"}
    found = accesses(_score, 90, pointers, {"SIZE": 384, "BLOCK": 128, "KEPT": 16, "COLUMNS": 64})
    assert found["ld v4.b32"] >= 16, found
