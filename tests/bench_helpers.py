"""For tests of benchmarks: engines that stand in for the one a benchmark opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.bench import measuring
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import FakeEngine


def fake(key: bytes | None, **changes: Any) -> FakeEngine:
    """A fake engine with room for some users' records."""
    return FakeEngine(key=key, **{"max_model_len": 1 << 15, "record_bytes": 8 << 20, **changes})


def use(monkeypatch: pytest.MonkeyPatch, made: Callable[[InferScaleConfig, bytes], Engine]) -> None:
    """Have benchmarks open this engine."""
    monkeypatch.setattr(measuring, "open_engine", made)


def run(name: str, file: Path, *given: str) -> dict[str, Any]:
    """Run a benchmark; what it wrote."""
    assert cli.main(["bench", name, *given, "--json", str(file)]) == 0
    for ending in (".png", ".svg"):
        assert file.with_suffix(ending).stat().st_size > 1000
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert result["meta"]["how"] and result["meta"]["time"]
    return result
