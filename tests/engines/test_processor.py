"""Which data type "auto" is on this processor and on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferscale_mem.engines.processor import cpu_dtype


@pytest.mark.parametrize(
    ("capability", "asked", "dtype"),
    [
        ("AVX2", "auto", "float32"),
        ("AVX2", "bfloat16", "bfloat16"),
        ("AVX512", "auto", "auto"),
        ("DEFAULT", "auto", "auto"),  # other architectures
    ],
)
def test_sixteen_bits_are_left_where_they_are_slow(
    capability: str, asked: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu_dtype(asked) == dtype


@pytest.mark.parametrize(("given", "added"), [((), True), (("--dtype=bfloat16",), False), (("--dtype", "auto"), False)])
def test_the_server_is_told_unless_its_user_says(
    given: tuple[str, ...], added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = pytest.importorskip("inferscale_mem.engines.vllm_serve")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(serve.current_platform, "is_cpu", lambda: True)
    options = serve.server_options(str(tmp_path), {}, given)
    assert ("--dtype" in options) is added
    assert not added or options[options.index("--dtype") + 1] == "float32"
