"""Triton's kernels, interpreted: a process of its own, since Triton decides that when it is imported."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "fused"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("test_*.py")))
def test_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / f"{name}.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert re.search(r"\d+ passed", answer.stdout), answer.stdout
