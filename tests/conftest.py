"""What every test gets: a home of its own, no network, no telemetry; and models that are made once and kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_REAL_HOME = Path.home()

# Before anything is imported: mem0, huggingface_hub and vLLM read these once.
_SESSION_HOME = tempfile.TemporaryDirectory(prefix="inferscale-tests-")
for _name in list(os.environ):
    if _name.startswith("INFERSCALE_") and _name != "INFERSCALE_TEST_CACHE":
        del os.environ[_name]
os.environ.update(
    HOME=_SESSION_HOME.name,
    MEM0_DIR=str(Path(_SESSION_HOME.name, "mem0")),
    INFERSCALE_HOME=str(Path(_SESSION_HOME.name, "inferscale")),
    HF_HUB_OFFLINE="1",
    HF_HOME=str(Path(_SESSION_HOME.name, "huggingface")),
    MEM0_TELEMETRY="false",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: those that start the vLLM engine come last, in their own order."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, with MEM0_DIR and INFERSCALE_HOME inside; nothing is in it."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("MEM0_DIR", str(folder / "mem0"))
    monkeypatch.setenv("INFERSCALE_HOME", str(folder / "inferscale"))
    return folder


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """Where what is slow to make is kept between runs; remove it at will."""
    given = os.environ.get("INFERSCALE_TEST_CACHE")
    folder = Path(given) if given else _REAL_HOME / ".cache" / "inferscale-mem-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_path(test_cache: Path) -> str:
    """Folder of the packaged SmolLM2-135M-Instruct, converted by the product's own code (bf16 safetensors)."""
    from inferscale_mem.config import InferScaleConfig
    from inferscale_mem.models import resolve_model

    return resolve_model(InferScaleConfig(home=test_cache))


@pytest.fixture
def warm_home(home: Path, smollm2_path: str) -> Path:
    """INFERSCALE_HOME in which the packaged model is converted already, so that nothing need be configured."""
    folder = home / "inferscale"
    folder.mkdir()
    (folder / "models").symlink_to(Path(smollm2_path).parent, target_is_directory=True)
    return folder


# Session-scoped engines (vLLM on the packaged model, shared by tests marked `engine`) belong below this line.
