"""``bench kernels`` on a small problem on a CPU, and what it checks; of times nothing. gpu_check, interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_helpers
import pytest
import torch

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.bench import cpu_kernels, kernels
from inferscale_mem.cli.bench.kernel_problem import Case, Problem, ulps
from inferscale_mem.errors import SelfTestError

SMALL = ("--device", "cpu", "--layers", "2", "--heads", "2", "--head-size", "32", "--repeat", "2")
REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "_last_level_cache", lambda: 1 << 20)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = torch.get_num_threads()
    result = bench_helpers.run("kernels", tmp_path / "kernels.json", *SMALL, "--facts", "1,7")
    threads = list(dict.fromkeys((1, every)))
    assert [(row["kernel"], row["threads"], row["tokens"], row["what"], row["n"]) for row in result["rows"]] == [
        (f"inject {form}, {packing}", number, tokens, what, 2)
        for tokens in (22, 154)
        for cached, packings in (("bf16", ("amx", "vec")), ("fp32", ("vec",)))
        for packing in packings
        for form in (cached, f"int8 to {cached}")
        for number in threads
        for what in ("kernel", "copy")
    ]
    # Keys and values of two layers, two heads of 32: two bytes each, or one and a scale of two for 32; and as cached.
    numbers = 22 * 2 * 2 * 2 * 32
    moved = {row["kernel"]: row["bytes"] for row in result["rows"] if row["tokens"] == 22}
    assert moved["inject bf16, amx"] == moved["inject bf16, vec"] == numbers * (2 + 2)
    scales = numbers // 32 * 2
    assert moved["inject int8 to bf16, amx"] == moved["inject int8 to bf16, vec"] == numbers * (2 + 1) + scales
    assert moved["inject fp32, vec"] == numbers * (4 + 4)
    assert moved["inject int8 to fp32, vec"] == numbers * (4 + 1) + scales
    assert all(ratio["ulps"] == 0 and ratio["copy_over_kernel"] > 0 for ratio in result["ratios"])
    assert "of a copy" in capsys.readouterr().out
    assert torch.get_num_threads() == every


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = cpu_kernels.Injector.__call__

    def off_by_one_row(self: cpu_kernels.Injector, rows: torch.Tensor, *rest: torch.Tensor) -> None:
        right(self, rows.roll(1), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_kernels.Injector, "__call__", off_by_one_row)
    assert cli.main(["bench", "kernels", *SMALL, "--facts", "2"]) == 1
    assert "differ from their references" in capsys.readouterr().err


@pytest.mark.parametrize(("off", "fine"), [(0.0, True), (1.0, True), (2.0, False), (float("inf"), False)])
def test_what_counts_as_wrong(off: float, fine: bool) -> None:
    case = Case("some kernel", 1, 22, 0.0, 1000, list)
    cases = [case, replace(case, ulps=off)]
    if fine:
        assert kernels.checked(cases) == cases
    else:
        with pytest.raises(SelfTestError, match="some kernel"):
            kernels.checked(cases)


def test_ulps() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, float("nan")], dtype=torch.bfloat16)
    other = one.clone()
    assert ulps(one, other) == 0
    other[1] = -1.0078125
    assert ulps(one, other) == 1
    other[2] = -0.0
    assert ulps(one, other) == 1
    other[0] = float("nan")
    assert ulps(one, other) == float("inf")


def test_a_problem_is_scattered() -> None:
    problem = Problem(2, 2, 32, 5 * 22, 16, torch.device("cpu"))
    rows, blocks, offsets = problem.places
    assert len(rows) == len(blocks) == len(offsets) == 110 == len(set(rows.tolist()))
    assert rows.max() < problem.num_rows and problem.num_rows == 4 * 5 * 24
    assert len(set(blocks.tolist())) == 8 and blocks.max() < problem.num_blocks == 36  # positions 30 to 139
    assert len({(b, o) for b, o in zip(blocks.tolist(), offsets.tolist(), strict=True)}) == 110
    assert problem.memory(torch.bfloat16).isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", "--device", "cuda"]) != 0
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--facts", "0"], ["--repeat", "0"], ["--head-size", "20"]])
def test_bad_arguments(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", "kernels", *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_gpu_check_interpreted() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_check.py")]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "topk of 200" in answer.stdout and "All agree" in answer.stdout
