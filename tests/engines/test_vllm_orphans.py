"""An app that is killed takes its engine with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

LONG = 120.0
"""Seconds after which a process that is still there stays."""


def gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def ends(pid: int) -> bool:
    deadline = time.monotonic() + LONG
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return gone(pid)


def kill_the_app(program: str, *arguments: str) -> int:
    """Run a program until it has printed the pid of the process that it started, and kill it."""
    app = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert app.stdout is not None
    pid = next(int(line.split()[1]) for line in app.stdout if line.startswith("STARTED "))
    assert not gone(pid)
    app.kill()
    app.wait()
    return pid


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
class TestOrphans:
    def test_a_process_ends_with_its_parent(self, tmp_path: Path) -> None:
        (tmp_path / "child.py").write_text(
            "import time\n"
            "from inferscale_mem.orphan import end_with_parent\n"
            "def wait():\n    end_with_parent()\n    time.sleep(600)\n"
        )
        program = """
            import multiprocessing, sys, time
            sys.path.insert(0, sys.argv[1])
            from child import wait
            process = multiprocessing.get_context("spawn").Process(target=wait)
            process.start()
            print("STARTED", process.pid, flush=True)
            time.sleep(600)
        """
        assert ends(kill_the_app(program, str(tmp_path)))

    @pytest.mark.engine
    def test_the_engine_of_a_killed_app(self, smollm2_path: str) -> None:
        program = """
            import multiprocessing, sys, time
            from inferscale_mem.config import EngineConfig
            from inferscale_mem.engines.vllm_local import VllmEngine
            engine = VllmEngine(sys.argv[1], EngineConfig(max_model_len=512, kv_cache_bytes=64 << 20))
            (core,) = multiprocessing.active_children()
            print("STARTED", core.pid, flush=True)
            time.sleep(600)
        """
        pid = kill_the_app(program, smollm2_path)
        try:
            assert ends(pid)
        finally:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_of_its_own_is_left_alone() -> None:
    from inferscale_mem.orphan import end_with_parent

    assert multiprocessing.parent_process() is None
    before = multiprocessing.process.current_process()
    end_with_parent()
    assert multiprocessing.process.current_process() is before
