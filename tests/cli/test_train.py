"""``train`` on a made-up file: real Mem0, real Qdrant, the real embedder; a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import locomo_file
import pytest
import tiny_models
import torch

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.train.lessons import Fact, Lesson, Lessons
from inferscale_mem.cli.train.training import Step, Trainer
from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.kv.preamble import Preamble


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return locomo_file.save(tmp_path_factory.mktemp("data"))


def test_what_it_writes_is_what_eval_encodes_behind(
    model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "preamble.safetensors"
    common = ["--data", str(data), "--model", model, "--dtype", "float32"]
    assert cli.main(["train", *common, "--out", str(out), "--k", "2,4", "--steps", "6", "--rate", "0.05"]) == 0
    assert "step 6 of 6" in capsys.readouterr().err
    rows, metas = {}, {}
    for name, more in {"without": [], "with": ["--preamble", str(out)]}.items():
        file = tmp_path / f"{name}.json"
        fixed = ["--engine", "transformers", "--record-gb", "0.05", "--k", "4", "--max-tokens", "0", "--again", "0"]
        assert cli.main(["eval", "locomo", *common, *fixed, *more, "--json", str(file)]) == 0
        found = json.loads(file.read_text(encoding="utf-8"))
        metas[name] = found["meta"]["preamble"]
        rows[name] = {row["policy"]: row["kl_mean"] for row in found["rows"]}
    assert metas == {"without": None, "with": Preamble.open(str(out)).segment.record}
    assert rows["with"]["alone"] == rows["without"]["alone"]
    assert rows["with"]["fact_chain(8, nearest)"] != rows["without"]["fact_chain(8, nearest)"]


# Not of mistral: with its window of 16 tokens no fact sees the header.
@pytest.mark.parametrize("family", [family for family in tiny_models.FAMILIES if family != "mistral"])
def test_training_lowers_the_loss(family: str, tmp_path: Path) -> None:
    path = tiny_models.save(family, tmp_path, hidden_size=128)
    facts = tuple(Fact(tuple(range(40 + 5 * i, 48 + 6 * i)), tuple(range(max(0, i - 2), i))) for i in range(5))
    lesson = Lesson((3, 1, 4, 2), tuple(range(100, 110)), tuple(range(60, 64)))
    lessons = Lessons(tuple(range(30, 41)), "digest", facts, {4: (lesson,)})
    model = HFModel(path, EngineConfig(kind="transformers", dtype="float32"))
    weights = [weight.clone() for weight in model._model.parameters()]
    trainer = Trainer(model, lessons, rate=0.02)
    trainer.prepare(lambda number: None)
    seen: list[Step] = []
    trainer.train(40, lambda number, step: seen.append(step))
    assert seen[0].loss > 1e-3
    assert seen[-1].loss < 0.7 * seen[0].loss
    assert all(torch.equal(*pair) for pair in zip(weights, model._model.parameters(), strict=True))


def test_served_in_the_order_they_were_encoded_in_there_is_nothing_to_learn(model: str) -> None:
    facts = tuple(Fact(tuple(range(40 + 5 * i, 48 + 6 * i)), tuple(range(i))) for i in range(4))
    lesson = Lesson((0, 1, 2, 3), tuple(range(100, 110)), tuple(range(60, 64)))
    lessons = Lessons(tuple(range(30, 41)), "digest", facts, {4: (lesson,)})
    trainer = Trainer(HFModel(model, EngineConfig(kind="transformers", dtype="float32")), lessons, rate=1e-9)
    trainer.prepare(lambda number: None)
    seen: list[Step] = []
    trainer.train(1, lambda number, step: seen.append(step))
    assert abs(seen[0].loss) < 1e-5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--policy", "alone"], "fact_chain"),
        (["--policy", "nonsense"], "not known"),
        (["--k", "0"], "--k"),
        (["--steps", "0"], "--steps"),
        (["--rate", "2"], "--rate"),
        (["--conversations", "nobody"], "nobody"),
    ],
)
def test_bad_options(
    given: list[str], said: str, model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p"
    assert cli.main(["train", "--data", str(data), "--model", model, "--out", str(out), *given]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_no_folder_to_write_to(model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "--data", str(data), "--model", model, "--out"]
    assert cli.main([*given, str(tmp_path / "missing" / "p")]) == 2
    assert cli.main([*given, str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
