"""What this machine has: a GPU or a CPU that vLLM can use, memory, and a folder that can be written."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from inferscale_mem.cli.doctor.finding import Finding
from inferscale_mem.config import InferScaleConfig

GIB = 1 << 30
ENGINE_BYTES = 3 * GIB
"""What an engine with a small model takes beside its caches, roughly."""
CPU_KV_BYTES = GIB
HOME_BYTES = GIB
"""The converted packaged model, and room for facts."""

_ASK_TORCH = (
    "import json, torch; cuda = torch.cuda.is_available(); print(json.dumps({'cuda': torch.version.cuda, "
    "'gpus': [[torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory] "
    "for i in range(torch.cuda.device_count())] if cuda else []}))"
)


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch can use.

    Attributes:
        cuda: the CUDA version of the installed torch; None for a build without.
        found: (name, bytes of memory) of each.
    """

    cuda: str | None = None
    found: tuple[tuple[str, int], ...] = ()


def find_gpus() -> Gpus:
    """Ask torch, in another process; none if torch does not work, which its own check reports."""
    done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return Gpus()
    answer = json.loads(done.stdout.splitlines()[-1])
    return Gpus(cuda=answer["cuda"], found=tuple((name, size) for name, size in answer["gpus"]))


def check_device(gpus: Gpus) -> Finding:
    """The GPU if there is one, else what the CPU can do."""
    if gpus.found:
        listed = ", ".join(f"{name} ({size / GIB:.0f} GiB)" for name, size in gpus.found)
        return Finding("device", "ok", f"CUDA {gpus.cuda}: {listed}")
    detail, usable = _cpu()
    if shutil.which("nvidia-smi"):
        advice = "To use it: pip install 'inferscale-mem[vllm]' in a fresh environment."
        return Finding("device", "warn", f"a GPU that torch cannot use, so the CPU: {detail}", advice)
    if not usable:
        return Finding("device", "fail", detail, "vLLM's CPU build needs AVX2; set INFERSCALE_ENGINE=transformers.")
    return Finding("device", "ok", detail)


def check_memory(config: InferScaleConfig, *, gpu: bool) -> Finding:
    """Free memory against what the settings ask for. On a GPU, caches lie there and are the engine's business."""
    free = available_memory()
    if free is None:
        return Finding("memory", "warn", "cannot be read on this system")
    engine = config.engine
    caches = 0 if gpu else engine.record_bytes + (engine.kv_cache_bytes or CPU_KV_BYTES)
    needed = ENGINE_BYTES + caches
    detail = f"{free / GIB:.1f} GiB free, about {needed / GIB:.1f} GiB needed for a small model"
    if free < needed:
        advice = "Close other programs, or make engine.record_bytes and engine.kv_cache_bytes smaller."
        return Finding("memory", "warn", detail, advice)
    return Finding("memory", "ok", detail)


def check_home(config: InferScaleConfig) -> Finding:
    """Whether the home folder can be written, or made; and how much room there is."""
    home = config.home.absolute()
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    if not nearest.is_dir() or not _writable(nearest):
        advice = f"Give this user the right to write to {nearest}, or set INFERSCALE_HOME."
        return Finding("home", "fail", f"{home} cannot be written", advice)
    free = shutil.disk_usage(nearest).free
    detail = f"{home}{'' if home.exists() else ' (made on first use)'}, {free / GIB:.1f} GiB free"
    if free < HOME_BYTES:
        return Finding("home", "warn", detail, "Free some space, or set INFERSCALE_HOME to a folder on another disk.")
    return Finding("home", "ok", detail)


def _writable(folder: Path) -> bool:
    """Tried, not asked: root may write anywhere, but no file system for processes takes a file."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def available_memory() -> int | None:
    """Bytes that can still be had, the container's limit included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    limit = _container_room()
    return free if free is None or limit is None else min(free, limit)


def _container_room() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdecimal() and used.isdecimal() else None


def _cpu() -> tuple[str, bool]:
    """What the CPU is, and whether vLLM's CPU build runs on it."""
    machine = platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if machine not in ("x86_64", "AMD64"):
        return f"CPU {machine}, {cores} cores", True
    flags = _cpu_flags()
    if flags is None:
        return f"CPU {machine}, {cores} cores, instruction sets unknown", True
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    slow = ", float32 by default (slow in 16 bits)" if sets == ["avx2"] else ""
    return f"CPU {machine}, {cores} cores, {' '.join(sets) or 'no AVX2'}{slow}", "avx2" in flags


def _cpu_flags() -> set[str] | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("flags")), None)
    return set(found.split()) if found else None
