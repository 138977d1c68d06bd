"""The code of a page of docs, for tests that run it."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
_PART = re.compile(r"^#+ ([^\n]*)$|^```python\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> dict[str, str]:
    """Heading and number -> code."""
    found: dict[str, str] = {}
    heading, number = "", 0
    for match in _PART.finditer((DOCS / page).read_text(encoding="utf-8")):
        if match[1]:
            heading, number = match[1], 0
        else:
            number += 1
            found[f"{heading} {number}"] = match[2]
    return found


def run_block(page: str, name: str) -> dict[str, Any]:
    """Run a block as a module of its own, and give its names; skip the test if a package it needs is not there."""
    code = blocks(page)[name]
    for package in sorted(_packages(code)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the code is only parsed")
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, f"{page}: {name}", "exec"), namespace)
    return namespace


def _packages(code: str) -> set[str]:
    """Top-level packages that the code imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    return names
