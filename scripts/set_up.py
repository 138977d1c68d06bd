"""Set up .venv from requirements/cpu.lock, saying what happens and how far it is. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VENV = REPO / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".ready"
LOCK = REPO / "requirements" / "cpu.lock"
LOG = VENV / "set-up.log"
ROOM_GB = 6
BEAT_S = 15.0

IMPORTS = "import torch, transformers, vllm, mem0, qdrant_client, langchain_core, langgraph, inferscale_mem"

CUDA_BUILD = """\
      This pip found only the CUDA build of torch. It runs without a GPU, but not without its libraries: installing
      them, some 3 GB more, once. (To have the small CPU build instead: stop here, `make clean`, and set
      PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU builds, which its installation page names.)"""


class SetUpError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main() -> None:
    start = time.monotonic()
    check_machine()
    pins = sum(1 for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line)
    print(f"Setting up .venv: {pins} packages, some 4 GB on disk. Once; 2 to 10 minutes.", flush=True)
    step(1, "making the environment")
    make_venv()
    step(2, f"installing the {pins} packages of {LOCK.relative_to(REPO)}")
    # Byte code is made on first import, of what is imported: making all of it takes longer than all else together.
    pip(["install", "--no-deps", "--no-compile", "--requirement", str(LOCK)], Counter(pins))
    step(3, "installing inferscale-mem itself, as a link to this folder")
    pip(["install", "--no-deps", "--no-build-isolation", "--editable", str(REPO)])
    step(4, "trying what was installed (the first import takes a while)")
    try_imports()
    STAMP.touch()
    print(f"      Ready after {time.monotonic() - start:.0f} s.", flush=True)


def step(number: int, what: str) -> None:
    print(f"[{number}/4] {what}", flush=True)


def check_machine() -> None:
    """Everything that can be known to fail, before it takes minutes."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        debian = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetUpError(
            f"{sys.executable} lacks the module {missing[0]}. On Debian and Ubuntu: apt-get install {debian}. Or name "
            "another Python: make PYTHON=/path/to/python3.11 ..."
        )
    free = shutil.disk_usage(REPO).free / 1e9
    if free < ROOM_GB and not VENV.exists():
        raise SetUpError(f"{REPO} has {free:.1f} GB of free disk; {ROOM_GB} GB are needed.")
    if sys.version_info[:2] != (3, 11):
        print(f"Note: the lock is made and tested with Python 3.11; this is {sys.version.split()[0]}.", flush=True)


def make_venv() -> None:
    """A new environment, or the old one if it is of this Python; what it holds is brought to the lock by pip."""
    STAMP.unlink(missing_ok=True)
    if not same_python():
        shutil.rmtree(VENV, ignore_errors=True)
        command = [sys.executable, "-m", "venv", str(VENV)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            tail = "\n".join((made.stdout + made.stderr).strip().splitlines()[-5:])
            raise SetUpError(f"{' '.join(command)} failed:\n{tail}")
    LOG.write_text("", encoding="utf-8")


def same_python() -> bool:
    """Whether .venv works and has this Python's version."""
    if not PYTHON.exists():
        return False
    command = [PYTHON, "-c", "import pip, sys; print(sys.version)"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.strip() == sys.version


class Heart:
    """Says that it is alive."""

    def __init__(self) -> None:
        self._said = self._start = time.monotonic()

    def take(self, line: str) -> None:
        """Look at one line of output."""

    def beat(self) -> None:
        """Say how far it is, if it is time to."""
        if time.monotonic() - self._said < BEAT_S:
            return
        self._said = time.monotonic()
        print(f"      {self._said - self._start:4.0f} s  {self.what()}".rstrip(), flush=True)

    def what(self) -> str:
        """How far it is."""
        return ""


class Counter(Heart):
    """Turns pip's lines into counts of packages."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = total
        self._fetched = 0
        self._now = ""
        self._unpacking = False

    def take(self, line: str) -> None:
        if line.startswith(("Collecting", "Requirement already satisfied", "Processing", "Ignoring")):
            self._fetched += 1
        if line.startswith("Collecting"):
            self._now = line.split()[1]
        self._unpacking = self._unpacking or line.startswith("Installing collected packages")

    def what(self) -> str:
        if self._unpacking:
            unpacked = sum(1 for _ in VENV.glob("lib/python3*/site-packages/*.dist-info"))
            return f"unpacked {min(unpacked, self._total)} of {self._total}"
        return f"fetched {min(self._fetched, self._total)} of {self._total}  {self._now}"


def pip(arguments: Sequence[str], watcher: Heart | None = None) -> None:
    """Run the environment's pip, its output in the log.

    Raises:
        SetUpError: it failed; with the end of its output.
    """
    command = [str(PYTHON), "-m", "pip", *arguments, "--disable-pip-version-check", "--progress-bar", "off"]
    watcher = watcher or Heart()
    code = watched(command, watcher.take, watcher.beat)
    if code != 0:
        tail = "\n".join(LOG.read_text(encoding="utf-8").strip().splitlines()[-15:])
        raise SetUpError(f"pip failed (everything it said is in {LOG.relative_to(REPO)}):\n{tail}")


def watched(
    command: Sequence[str],
    take: Callable[[str], None],
    beat: Callable[[], None],
    environment: dict[str, str] | None = None,
) -> int:
    """Run a command; each line of its output goes to ``take`` and the log, ``beat`` is called every second.

    Returns:
        The command's exit code.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, env=environment, **pipes)
    ended = threading.Event()

    def keep_beating() -> None:
        while not ended.wait(1.0):
            beat()

    beats = threading.Thread(target=keep_beating, daemon=True)
    beats.start()
    try:
        assert process.stdout is not None
        with LOG.open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                take(line)
        return process.wait()
    finally:
        ended.set()
        beats.join()
        if process.poll() is None:
            process.terminate()
            process.wait()


def try_imports() -> None:
    """Import everything once; give a CUDA build of torch the libraries it needs.

    Raises:
        SetUpError: something cannot be imported.
    """
    if run_quietly("import torch") != "" and torch_wants_libraries():
        print(CUDA_BUILD, flush=True)
        torch = next(line for line in LOCK.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
        pip(["install", torch, "--constraint", str(LOCK)], Counter(30))
    trouble = run_quietly(IMPORTS)
    if trouble:
        raise SetUpError(f"What was installed does not work:\n{trouble}\nTry again after: make clean")


def torch_wants_libraries() -> bool:
    """Whether the installed torch is a CUDA build."""
    code = "import importlib.metadata as m; print(any('nvidia' in r for r in m.requires('torch') or []))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


def run_quietly(code: str) -> str:
    """Run Python code in the environment; the end of what it said if it failed, "" if all went well."""
    environment = {**os.environ, "MEM0_TELEMETRY": "false", "VLLM_LOGGING_LEVEL": "ERROR"}
    said: list[str] = []
    failed = watched([str(PYTHON), "-c", code], said.append, Heart().beat, environment)
    return ("".join(said[-5:]).strip() or "(it said nothing)") if failed else ""


if __name__ == "__main__":
    try:
        main()
    except SetUpError as error:
        sys.exit(f"Set-up failed. {error}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up stopped; the same command goes on where it was.")
