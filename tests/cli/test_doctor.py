"""The doctor: on this machine for real, and on machines that lack something."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.doctor import libraries, machine
from inferscale_mem.cli.doctor import models as doctor_models
from inferscale_mem.cli.doctor.libraries import Library, check_library
from inferscale_mem.cli.doctor.machine import Gpus, check_device, check_home, check_memory
from inferscale_mem.cli.doctor.models import check_embedder, check_key, check_model
from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.handle_key import KEY_FILE, load_key
from inferscale_mem.models import converted_folder

REPO = Path(__file__).parent.parent.parent


def test_this_machine_has_all_that_is_needed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["inferscale-mem", "doctor", "--json", str(tmp_path / "found.json")])
    assert cli.main() == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["ok"] is True
    names = [check["name"] for check in found["checks"]]
    for name in ("python", "torch", "vllm", "mem0", "device", "memory", "home", "handle key", "model", "embedder"):
        assert name in names
        assert f" {name} " in shown
    assert list(home.iterdir()) == [], "the doctor changes nothing"


def test_a_wrong_setting_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("INFERSCALE_ENGINE", "steam")
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "engine.kind='steam' is not known" in shown and "Needed and not working: settings." in shown


@pytest.mark.parametrize(
    ("library", "needed", "status", "told"),
    [
        (Library("yaml", ("PyYAML",), "1", "99"), True, "ok", ""),
        (Library("yaml", ("not-there", "PyYAML"), "1", "2"), True, "warn", "not a tested version"),
        (Library("yaml", ("PyYAML",), "98", "99"), True, "warn", "not a tested version"),
        (Library("no_such_module", ("not-there",), "1", "2"), True, "fail", "not installed"),
        (Library("no_such_module", ("not-there",), "1", "2"), False, "ok", "not needed"),
        (Library("no_such_module", ("PyYAML",), "1", "99"), True, "fail", "No module named 'no_such_module'"),
        (Library("no_such_module", ("PyYAML",), "1", "99"), False, "warn", "cannot be imported"),
    ],
)
def test_libraries(library: Library, needed: bool, status: str, told: str) -> None:
    found = check_library(library, needed=needed)
    assert found.status == status
    assert told in found.detail
    assert bool(found.advice) == (status != "ok")


def test_a_missing_library_names_its_extra() -> None:
    assert "inferscale-mem[vllm]" in check_library(Library("x", ("not-there",), "1", "2", "vllm"), needed=True).advice
    assert check_library(Library("x", ("not-there",), "1", "2"), needed=True).advice == "pip install 'not-there>=1,<2'"


def test_tested_versions_are_those_of_the_project_file() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for library in (*libraries.BASE, libraries.VLLM, libraries.TRANSFORMERS):
        line = next(line for line in asked if line.startswith(f"{library.distributions[0]}>="))
        assert f">={library.low}" in line
        assert f"<{library.high}" in line or "<" not in line


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = check_device(Gpus("13.0", (("Some GPU", 80 << 30),)))
    assert gpu.status == "ok" and gpu.detail == "CUDA 13.0: Some GPU (80 GiB)"
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "inferscale-mem[vllm]" in check_device(Gpus()).advice
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "_cpu_flags", lambda: {"sse2"})
    assert check_device(Gpus()).status == "fail"
    monkeypatch.setattr(machine, "_cpu_flags", lambda: {"avx2", "avx512f"})
    assert check_device(Gpus()).status == "ok"
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert check_device(Gpus()).detail.startswith("CPU aarch64")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferScaleConfig(engine=EngineConfig(record_bytes=2 << 30, kv_cache_bytes=1 << 30))
    monkeypatch.setattr(machine, "available_memory", lambda: 5 << 30)
    low = check_memory(config, gpu=False)
    assert low.status == "warn" and "record_bytes" in low.advice
    assert check_memory(config, gpu=True).status == "ok"
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert check_memory(config, gpu=False).status == "warn"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_read() -> None:
    assert 0 < (machine.available_memory() or 0) < 1 << 50


def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    found = check_home(InferScaleConfig(home=tmp_path / "file" / "home"))
    assert found.status == "fail" and "INFERSCALE_HOME" in found.advice
    assert check_home(InferScaleConfig(home=tmp_path / "new" / "home")).status in ("ok", "warn")
    assert not (tmp_path / "new").exists()


def test_handle_key(tmp_path: Path) -> None:
    config = InferScaleConfig(home=tmp_path)
    assert "made on first use" in check_key(config).detail
    assert not (tmp_path / KEY_FILE).exists()
    load_key(config)
    assert check_key(config).status == "ok"
    os.chmod(tmp_path / KEY_FILE, 0o644)
    found = check_key(config)
    assert found.status == "fail" and "chmod 600" in found.advice
    assert check_key(InferScaleConfig(home=tmp_path, handle_key="ab" * 32)).status == "ok"


def test_models(tmp_path: Path, warm_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "converted on first use" in check_model(InferScaleConfig(home=tmp_path)).detail
    warm = InferScaleConfig(home=warm_home)
    assert "every byte" in check_model(warm).detail
    bad = check_model(InferScaleConfig(model="./nowhere"))
    assert bad.status == "fail" and "does not exist" in bad.detail and bad.advice
    shutil.copytree(converted_folder(warm), tmp_path / "mute")
    for file in (tmp_path / "mute").glob("chat_template*"):
        file.unlink()
    mute = check_model(InferScaleConfig(model=str(tmp_path / "mute")))
    assert mute.status == "fail" and "no chat template" in mute.detail
    assert check_model(InferScaleConfig(model=str(converted_folder(warm)))).status == "ok"
    assert check_embedder(InferScaleConfig(embedder="./nowhere")).status == "fail"
    assert check_embedder(warm).status == "ok"
    converted_folder(InferScaleConfig(home=tmp_path)).mkdir(parents=True)
    broken = check_model(InferScaleConfig(home=tmp_path))
    assert broken.status == "warn" and "converted again" in broken.advice


def test_without_what_converts_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_models.importlib.util.find_spec
    monkeypatch.setattr(doctor_models.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    found = check_model(InferScaleConfig(home=tmp_path))
    assert found.status == "fail" and found.advice == "pip install gguf accelerate"
