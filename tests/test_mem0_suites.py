"""The script that runs Mem0's own tests on our classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "mem0_suites.py"

TESTS = """
import mem0
from mem0.memory.main import AsyncMemory, Memory


def test_the_same_everywhere():
    assert mem0.Memory is Memory and mem0.AsyncMemory is AsyncMemory
    assert "site-packages" in mem0.__file__


def test_of_mem0_only():
    assert Memory.__module__ == AsyncMemory.__module__ == "mem0.memory.main"
"""


def test_differences_are_found(tmp_path: Path) -> None:
    (tmp_path / "mem0").mkdir()
    (tmp_path / "mem0" / "__init__.py").write_text("raise ImportError('the one in the checkout')", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "test_it.py"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Mem0: 2 passed" in done.stdout and "InferScale-Mem: 1 passed, 1 failed" in done.stdout
    assert "only with InferScale-Mem: failed: test_it.py test_it::test_of_mem0_only" in done.stdout


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "is it a clone of mem0ai/mem0?" in done.stderr
