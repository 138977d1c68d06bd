from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale_mem import engines
from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.errors import EngineClosedError
from inferscale_mem.testing import FakeEngine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    """Engines that open_engine has started; what starting a real one does is tested with real ones."""
    made: list[FakeEngine] = []

    def start(model: str, config: EngineConfig, key: bytes | None) -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    monkeypatch.setattr(engines, "_start", start)
    monkeypatch.setattr(engines, "resolve_model", lambda config: config.model)
    yield made
    for engine in made:
        engine.close()


def config(home: Path, **changes: object) -> InferScaleConfig:
    return InferScaleConfig(model="m", home=home, engine=EngineConfig(**changes))  # type: ignore[arg-type]


def test_one_engine_per_configuration_closed_with_its_last_holder(started: list[FakeEngine], tmp_path: Path) -> None:
    first, second = (engines.open_engine(config(tmp_path), b"k" * 16) for _ in range(2))
    other = engines.open_engine(config(tmp_path, max_model_len=128), b"k" * 16)
    assert len(started) == 2
    first.close()
    first.close()
    assert second.status().records == 0
    with pytest.raises(EngineClosedError):
        first.status()
    second.close()
    with pytest.raises(EngineClosedError):
        started[0].status()
    other.close()
    engines.open_engine(config(tmp_path), b"k" * 16).close()
    assert len(started) == 3


def test_a_dead_engine_is_not_handed_out_again(started: list[FakeEngine], tmp_path: Path) -> None:
    holders = [engines.open_engine(config(tmp_path)) for _ in range(2)]
    started[0].dead = True
    holders[0].close()
    again = engines.open_engine(config(tmp_path))
    assert len(started) == 2 and again.status().records == 0
    holders[1].close()
    assert engines.open_engine(config(tmp_path)).status().records == 0 and len(started) == 2
