"""docs/scaling.md shows what benchmarks/scaling.py computes, and that computes what it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", REPO / "benchmarks" / "scaling.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_its_tables(scaling: ModuleType) -> None:
    page = (REPO / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert scaling.written(page, scaling.Inputs()) == page, "run: python benchmarks/scaling.py --write"
    assert scaling.written(page, scaling.Inputs(facts=100)) != page
    assert "**No GPU was\nmeasured for this page.**" in page


def test_a_page_without_a_place_is_an_error(scaling: ModuleType) -> None:
    with pytest.raises(ValueError, match="weights"):
        scaling.written("# Nothing", scaling.Inputs())


def test_measured_bytes_are_those_of_the_results(scaling: ModuleType) -> None:
    meta = json.loads((REPO / "benchmarks" / "results" / "ttft-cpu.json").read_text(encoding="utf-8"))["meta"]
    measured = {name: count for name, count, *_ in scaling.MODELS}["SmolLM2-135M"]
    assert meta["bytes_per_token"] == measured == 2 * 2 * 30 * 3 * 64


def test_arithmetic(scaling: ModuleType) -> None:
    given = scaling.Inputs()
    assert given.bytes_per_token == 131_072
    assert given.user_bytes == pytest.approx(200 * 22 * 131_072)
    saved = given.gpu_seconds(injected=False) - given.gpu_seconds(injected=True)
    assert saved == pytest.approx(50 * 22 / given.prefill_per_s)
    # Ten times the price of the GPU makes keeping worth it for ten times as long.
    rows = [scaling.tiers(replace(given, gpu_hour=price)).splitlines()[4].split(" | ") for price in (2.5, 25.0)]
    assert [row[0] for row in rows] == ["| disk", "| disk"]
    assert [float(row[6].removesuffix(" h")) for row in rows] == pytest.approx([2.0, 19.6], abs=0.06)


def test_where(scaling: ModuleType) -> None:
    given = replace(scaling.Inputs(), slab_gb=1.0, host_gb=10.0, disk_gb=100.0)
    one = given.user_bytes / scaling.GB
    places = [scaling._where(given, 1, gb / one, 1.0).split(" (")[0] for gb in (0.9, 1.1, 11.1, 111.1)]
    assert places == ["slab", "host", "disk", "computed again"]
    assert scaling._where(given, 2, 1.1 / one, 1.0).startswith("slab")
    assert scaling._where(given, 1, 1.1 / one, 0.5).startswith("slab")
