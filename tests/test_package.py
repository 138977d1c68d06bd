"""What holds for the package as a whole: light to import, one direction of imports, a README that compiles."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import inferscale_mem

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "inferscale_mem"
HEAVY = ("torch", "vllm", "transformers", "triton", "mem0", "langchain", "langchain_core", "langgraph", "qdrant_client")
ROOT_PACKAGES = ("memory_block", "models", "reading", "recording")
"""Packages that are held to the same rules as root files."""
ROOT_HEAVY_HALVES = {"models.bundled"}
"""Root modules that load torch, and are themselves loaded only when their work is to be done."""


def modules() -> dict[str, Path]:
    """Every module of the package: dotted name below the package ("kv.rope") -> file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, functions included, TYPE_CHECKING blocks left out."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))
    return found


def ours(path: Path) -> set[str]:
    """Names below the package that a file imports, wherever in the file: {"kv.rope", …}."""
    prefix = "inferscale_mem."
    return {name.removeprefix(prefix) for name in imports(path) if name.startswith(prefix)}


def top(name: str) -> str:
    return name.split(".")[0]


def in_part(names: set[str], *parts: str) -> set[str]:
    return {name for name in names if top(name) in parts}


def is_root(name: str) -> bool:
    return top(name) in ROOT_PACKAGES or ("." not in name and (PACKAGE / f"{name}.py").is_file())


def test_the_walk_sees_imports() -> None:
    """The other tests mean nothing if the walk finds nothing."""
    assert "inferscale_mem.errors" in imports(PACKAGE / "models" / "__init__.py")
    assert "torch" in imports(PACKAGE / "models" / "bundled.py")
    assert {"types", "config", "protocols", "models", "kv.rope", "cli.main"} <= set(modules())


def test_import_is_light() -> None:
    script = (
        "import json, sys, time; start = time.perf_counter(); import inferscale_mem; "
        "spent = time.perf_counter() - start; print(json.dumps({'spent': spent, 'loaded': sorted(sys.modules)}))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPO)
    result = json.loads(answer.stdout)
    loaded = {name.split(".")[0] for name in result["loaded"]}
    assert not loaded & set(HEAVY)
    assert "numpy" not in loaded


@pytest.mark.parametrize("name", sorted(n for n in modules() if is_root(n) and n not in ROOT_HEAVY_HALVES))
def test_root_modules_are_light(name: str) -> None:
    """Also through what they import themselves."""
    script = f"import sys, inferscale_mem.{name}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPO)
    assert not set(answer.stdout.split()) & set(HEAVY)


def test_all_matches() -> None:
    assert sorted(inferscale_mem.__all__) == inferscale_mem.__all__
    for name in inferscale_mem.__all__:
        assert getattr(inferscale_mem, name).__name__ == name
        assert name in dir(inferscale_mem)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = inferscale_mem.NoSuchName


def test_kernels_import_nothing_of_ours() -> None:
    for name, path in modules().items():
        if top(name) == "kernels":
            assert not {other for other in ours(path) if top(other) != "kernels"}, path


def test_kv_imports_only_kernels_and_root_files() -> None:
    for name, path in modules().items():
        if top(name) == "kv":
            assert not in_part(ours(path), "adapters", "engines", "cli", "testing"), path
            for leaf in {name for name in ours(path) if is_root(name) and name in modules()}:
                assert not in_part(ours(modules()[leaf]), "kv"), f"{path} imports {leaf}, which imports kv"


def test_root_files_import_no_adapters_engines_or_cli() -> None:
    for name, path in modules().items():
        if is_root(name) and name != "__init__":
            assert not in_part(ours(path), "adapters", "engines", "cli"), path


def test_adapters_and_engines_meet_through_protocols_only() -> None:
    for name, path in modules().items():
        if top(name) == "engines":
            assert not in_part(ours(path), "adapters", "cli"), path
        if top(name) == "adapters":
            # An adapter may open an engine when it was given none; the parts of engines are none of its business.
            inner = {n for n in in_part(ours(path), "engines", "kv", "kernels", "cli") if not n.startswith("engines")}
            assert not inner, path
            assert in_part(ours(path), "engines") <= {"engines", "engines.open_engine"}, path


@pytest.mark.parametrize(
    ("library", "where"),
    [
        ("vllm", r"kv\.connector(\..*)?|engines\.vllm_\w+"),
        ("httpx", r"engines\.vllm_server"),
        ("triton", r"kernels\.\w+\.fused"),
        ("numba", r"kernels\.(\w+\.cpu|compiling|instructions)"),
        ("mem0", r"adapters\.mem0(\..*)?|cli\.bench\.memories"),
        ("qdrant_client", r"adapters\.mem0(\..*)?"),
        ("langchain", r"adapters\.lang(chain|graph)(\..*)?"),
        ("langchain_core", r"adapters\.lang(chain|graph)(\..*)?|cli\.chat\..*"),
        ("langgraph", r"adapters\.langgraph(\..*)?"),
        (
            "torch",
            r"kv(\..*)?|kernels(\..*)?|engines(\..*)?|models\.bundled|adapters\.mem0\.(embed\w*|vectors)"
            r"|cli\.bench\.\w*kernel\w*|cli\.train\.training",
        ),
        ("transformers", r"kv(\..*)?|engines(\..*)?|models\.bundled|adapters\.mem0\.embed\w*"),
    ],
)
def test_a_library_is_imported_only_where_it_is_the_job(library: str, where: str) -> None:
    users = {name for name, path in modules().items() if any(top(i) == library for i in imports(path))}
    assert {name for name in users if not re.fullmatch(where, name)} == set()


def touches_environment(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes}
    return bool(names & {"environ", "getenv", "putenv"})


def test_only_config_reads_the_environment() -> None:
    # These two set variables that other libraries read when they are imported.
    setters = {"adapters.mem0.telemetry", "cli.chat.command"}
    assert {name for name, path in modules().items() if touches_environment(path)} - setters == {"config"}


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_readme_code_compiles_and_imports_what_exists() -> None:
    blocks = python_blocks(REPO / "README.md")
    assert len(blocks) >= 2
    for block in blocks:
        tree = ast.parse(block)
        compile(tree, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("inferscale_mem"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?! sure)", (REPO / "README.md").read_text(encoding="utf-8")))
    assert {"chat", "test", "lint", "bench", "clean"} <= targets
    assert named <= targets
    assert {"chat", "test"} <= named


def test_examples_are_short() -> None:
    for path in (REPO / "examples").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path


def test_version_has_a_changelog_entry() -> None:
    assert f"## {inferscale_mem.__version__}" in (REPO / "CHANGELOG.md").read_text(encoding="utf-8")


def test_tracked_lock_names_no_place() -> None:
    lock = (REPO / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    pins = [line for line in lock.splitlines() if line and not line.startswith("#")]
    assert len(pins) > 100
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; [a-z_]+ [=><!]+ \"[\w.]+\")?", pin), pin
