"""While a model is loaded torch's default dtype is that model's, in every thread: one is loaded at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import transformers

from inferscale_mem.adapters.mem0 import embedder
from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.models.loading import LOADING


def load_model(folder: Path) -> None:
    HFModel(tiny_models.save("llama", folder), EngineConfig(kind="transformers"))


def load_embedder(folder: Path) -> None:
    LocalEmbedder().embed("I keep bees")


@pytest.mark.parametrize(("load", "name"), [(load_model, "AutoModelForCausalLM"), (load_embedder, "AutoModel")])
def test_one_at_a_time(
    load: Callable[[Path], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder, "_encoders", embedder._Encoders())  # as in a process that has loaded none
    kind: Any = getattr(transformers, name)
    from_pretrained, alone = kind.from_pretrained, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        alone.append(LOADING._is_owned())  # type: ignore[attr-defined]
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(kind, "from_pretrained", watched)
    load(tmp_path)
    assert alone == [True]
