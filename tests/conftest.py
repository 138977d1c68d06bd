"""What every test gets: a home of its own, no network, no telemetry; and models that are made once and kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from live_server import LiveServer

    from inferscale_mem.protocols import Engine

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


@pytest.fixture(scope="session")
def vllm_engine(smollm2_path: str) -> Iterator[Engine]:
    """The packaged model on vLLM as users run it: beside this process, bfloat16. Started once, shared by all tests."""
    from inferscale_mem.config import EngineConfig
    from inferscale_mem.engines.vllm_local import VllmEngine
    from inferscale_mem.testing.scene import KEY

    engine = VllmEngine(smollm2_path, EngineConfig(record_bytes=256 << 20, kv_cache_bytes=512 << 20), KEY)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def server(smollm2_path: str) -> Iterator[LiveServer]:
    """``inferscale-mem serve`` with the packaged model, in a process of its own. Started once, shared by all tests."""
    from live_server import LiveServer, live_server

    if running := os.environ.get("TEST_SERVER_URL"):  # one that was started by hand, with the tests' handle key
        yield LiveServer(running, Path(os.devnull))
        return
    sizes = ("--record-bytes", str(256 << 20), "--kv-cache-memory-bytes", str(512 << 20))
    with live_server(smollm2_path, *sizes) as server:
        yield server


@pytest.fixture(scope="module")
def open_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Opens tiny models of a family on vLLM, in this process, in float32; one at a time, the one before is closed."""
    import tiny_models

    from inferscale_mem.config import EngineConfig
    from inferscale_mem.engines.vllm_local import VllmEngine

    opened: list[Engine] = []

    def open_one(family: str, config: dict[str, Any] | None = None, **changes: Any) -> Engine:
        for engine in opened:
            engine.close()
        # Heads of 32, the smallest that the CPU backend takes; Qwen2 derives them from the hidden size.
        path = tiny_models.save(family, tmp_path_factory.mktemp(family), **{"hidden_size": 128, **changes})
        settings = {"multiprocess": False, "dtype": "float32", "block_size": 32, "record_bytes": 16 << 20}
        settings |= {"kv_cache_bytes": 32 << 20, **(config or {})}
        opened.append(VllmEngine(path, EngineConfig(**settings)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()
