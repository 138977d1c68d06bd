"""The same evaluation through vLLM and through transformers gives the same figures, up to float32's noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import locomo_file
import pytest
import tiny_models

from inferscale_mem.cli import main as cli

pytestmark = pytest.mark.engine

FIGURES = ("ll", "dll", "kl_mean", "kl_first", "top1", "f1", "bleu1", "recall", "encode_tokens_per_fact", "n")


def test_figures_agree(tmp_path: Path) -> None:
    # Heads of 32 are the smallest that vLLM's CPU backend takes.
    model = tiny_models.save("llama", tmp_path / "model", hidden_size=128, max_position_embeddings=1024)
    data = locomo_file.save(tmp_path)
    found: dict[str, list[dict[str, Any]]] = {}
    for engine in ("transformers", "vllm"):
        file = tmp_path / f"{engine}.json"
        fixed = ["--engine", engine, "--dtype", "float32", "--model", model, "--record-gb", "0.05", "--json", str(file)]
        asked = ["--policy", "fact_chain(2, nearest)", "--text-tail", "0,1", "--k", "3", "--max-tokens", "4"]
        assert cli.main(["eval", "locomo", "--data", str(data), *fixed, *asked]) == 0
        found[engine] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert max(row["kl_mean"] for row in found["vllm"] if row["policy"] == "text again") < 1e-5
    for one, two in zip(found["transformers"], found["vllm"], strict=True):
        assert (one["policy"], one["text_tail"]) == (two["policy"], two["text_tail"])
        for name in FIGURES:
            assert one[name] == pytest.approx(two[name], abs=2e-3), (one["policy"], name)
