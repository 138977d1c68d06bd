"""Arguments that several commands share: files for results that cannot be written are refused at once; usages."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.bench import BENCHMARKS

MEASURING = ["doctor", "chat", *(f"bench {name}" for name in BENCHMARKS), "eval locomo"]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise AssertionError("it started")

    for module, _ in cli.COMMANDS.values():
        monkeypatch.setattr(importlib.import_module(module), "run", run)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", MEASURING)
def test_results_that_cannot_be_written(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*command.split(), *(["--data", "x"] if command.startswith("eval") else [])]
    said = refused([*words, "--json", str(tmp_path / "no" / "such" / "x.json")], capsys)
    assert f"usage: inferscale-mem {command}" in said
    assert f"there is no folder {tmp_path / 'no' / 'such'}; make it first" in said
    assert not (tmp_path / "no").exists()
    assert "is a folder; name a file" in refused([*words, "--json", str(tmp_path)], capsys)
    for name in ("x.jsonl", "x.png", "Llama-3.1"):
        assert "must end in .json" in refused([*words, "--json", str(tmp_path / name)], capsys)
    file = tmp_path / "good.json"
    with pytest.raises(AssertionError, match="it started"):
        cli.main([*words, "--json", str(file)])
    assert not file.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_folder_that_may_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in refused(["doctor", "--json", str(tmp_path / "x.json")], capsys)


@pytest.mark.parametrize("command", [f"bench {name}" for name in BENCHMARKS] + ["eval locomo"])
def test_an_unknown_argument_shows_the_usage_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", "x"] if command.startswith("eval") else []
    said = refused([*command.split(), *given, "--no-such", "x"], capsys)
    assert said.startswith(f"usage: inferscale-mem {command} [-h]")
    assert f"inferscale-mem {command}: error: unrecognized arguments: --no-such x" in said
