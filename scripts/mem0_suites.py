r"""Run Mem0's own tests with its classes exchanged for ours, and as they are, on the installed Mem0; print both counts.

    git clone https://github.com/mem0ai/mem0 /tmp/mem0
    python scripts/mem0_suites.py /tmp/mem0
    python scripts/mem0_suites.py /tmp/mem0 tests/test_memory.py -- -k entity      some of them, with options of pytest

The checkout brings tests only: the Mem0 that is tested is the installed one. Its tests need more packages than this one
does. They may be put in a folder of their own, for --packages:

    pip install --no-deps --target DIR pytest-mock litellm fastuuid slowapi limits deprecated wrapt passlib \
        bcrypt==4.0.1 python-jose ecdsa rsa pyasn1 psycopg psycopg-pool alembic Mako 'importlib_metadata<9' zipp

Exits with 1 if any test fails with our classes that passes with Mem0's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

FILES = (
    "tests/test_main.py",
    "tests/test_memory.py",
    "tests/memory/test_main.py",
    "tests/memory/test_storage.py",
    "tests/memory/test_session_scope.py",
    "tests/test_memory_integration.py",
    "tests/test_proxy.py",
    "tests/test_server_params.py",
    "tests/test_chatty_llm_parsing.py",
    "tests/memory/test_json_prompt_fix.py",
    "tests/vector_stores/test_qdrant.py",
)
SWAP = "MEM0_SUITES_SWAP"
PATHS = "MEM0_SUITES_PATHS"
KINDS = ("passed", "failed", "skipped")

Results = dict[str, str]
"""Test -> "passed", "failed" or "skipped"."""


def prepare() -> None:
    """Import the installed Mem0, and put our classes where tests import its own from.

    As a plugin of pytest, this module does so before collection.
    """
    import mem0
    import mem0.memory.main as main

    paths = os.environ.get(PATHS, "").split(os.pathsep)
    if Path(paths[0]) in Path(str(mem0.__file__)).parents:
        raise ImportError(f"Mem0 comes from {mem0.__file__}, not from the installed packages.")
    sys.path += paths
    if os.environ.get(SWAP) != "1":
        return
    from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory

    mem0.Memory = main.Memory = InferScaleMemory
    mem0.AsyncMemory = main.AsyncMemory = AsyncInferScaleMemory


def run(checkout: Path, file: str, options: list[str], packages: Path | None, *, swap: bool) -> Results:
    """Run one file in a process, home folder and telemetry setting of its own."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="mem0-suites-") as home:
        report = Path(home, "report.xml")
        paths = [here, here.parent, checkout, checkout / "server", *([packages] if packages else [])]
        environment = {
            **os.environ,
            "HOME": home,
            "MEM0_DIR": str(Path(home, "mem0")),
            "INFERSCALE_HOME": str(Path(home, "inferscale")),
            "MEM0_TELEMETRY": "false",
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else importing it asks the network
            "AUTH_DISABLED": "true",  # Mem0's server
            # The checkout has a mem0 of its own, which must come behind the installed one.
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths[:2])),
            PATHS: os.pathsep.join(map(str, paths[2:])),
            SWAP: "1" if swap else "0",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, file, f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", "-o", "pythonpath=", "--rootdir", str(checkout), *options]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not report.exists():
            sys.exit(f"pytest did not run {file}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return read(report)


def read(report: Path) -> Results:
    """What became of each test, from pytest's report."""
    results = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        results[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return results


def count(results: Results) -> str:
    """E.g. "44 passed, 1 failed"."""
    counts = [(kind, sum(outcome == kind for outcome in results.values())) for kind in KINDS]
    return ", ".join(f"{number} {kind}" for kind, number in counts if number) or "none"


def revision(checkout: Path) -> str:
    """Which commit the tests are from."""
    done = subprocess.run(["git", "log", "-1", "--format=%h of %cs"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() or str(checkout)


def main() -> int:
    """Run all files twice and compare."""
    given, options = sys.argv[1:], []
    if "--" in given:
        given, options = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of mem0ai/mem0")
    parser.add_argument("files", nargs="*", default=list(FILES), help="tests in it; default: those of memory and proxy")
    parser.add_argument("--packages", type=Path, help="folder with packages that Mem0's tests need")
    arguments = parser.parse_intermixed_args(given)
    checkout = arguments.checkout.resolve()
    missing = [file for file in arguments.files if not (checkout / file).is_file()]
    if missing:
        parser.error(f"{checkout} has no {missing[0]}; is it a clone of mem0ai/mem0?")
    print(f"Mem0 {version('mem0ai')}, tests of {revision(checkout)}")
    theirs: Results = {}
    ours: Results = {}
    for file in arguments.files:
        found = [run(checkout, file, options, arguments.packages, swap=swap) for swap in (False, True)]
        print(f"{file:42} Mem0: {count(found[0]):28} InferScale-Mem: {count(found[1])}", flush=True)
        theirs |= {f"{file} {name}": outcome for name, outcome in found[0].items()}
        ours |= {f"{file} {name}": outcome for name, outcome in found[1].items()}
    print(f"{'all':42} Mem0: {count(theirs):28} InferScale-Mem: {count(ours)}")
    worse = [name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed"]
    for name in worse:
        print(f"only with InferScale-Mem: {ours.get(name, 'missing')}: {name}")
    for name, outcome in theirs.items():
        if outcome == "failed" and ours.get(name) == "failed":
            print(f"with both: failed: {name}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
elif os.environ.get(SWAP):
    prepare()
