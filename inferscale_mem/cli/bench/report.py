"""What all benchmarks print and write: progress, a table, JSON, pictures, and what machine it was."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import inferscale_mem
from inferscale_mem.errors import MissingDependencyError
from inferscale_mem.protocols import Engine


def progress(text: str) -> None:
    """A line on stderr, written over by the next where stderr is a terminal."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{text:<60}", end=end, file=sys.stderr, flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)
    )


def system(device: str) -> dict[str, Any]:
    """Device, versions and time, for the ``meta`` of results."""
    return {
        "device": device,
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "inferscale_mem": inferscale_mem.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine(engine: Engine, **more: Any) -> dict[str, Any]:
    """The same for an engine, and its model."""
    return {
        **system(engine.info.device),
        "engine": engine.info.version,
        "model": Path(engine.info.model).name,
        "dtype": engine.info.dtype,
        "record_dtype": engine.info.record_dtype,
        "block_size": engine.info.block_size,
        "bytes_per_token": engine.info.bytes_per_token,
        **more,
    }


def check_pictures() -> None:
    """Before anything is measured: whether pictures can be made.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "bench")


def write_json(file: Path, result: Mapping[str, Any]) -> Path:
    """Write results."""
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return file


def publish(
    file: Path | None,
    rows: Sequence[Mapping[str, Any]],
    ratios: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    labels: Mapping[str, str],
) -> None:
    """Write what was measured to a file, and pictures beside it; nothing if there is no file."""
    if file is None:
        return
    result = {"rows": list(rows), "ratios": list(ratios), "meta": dict(meta)}
    for written in (write_json(file, result), *write_pictures(file, lines, labels, meta)):
        print(f"wrote {written}")


MOST_LETTERS = 40
"""Of a name in a picture's legend that has another beside it."""


def write_pictures(
    file: Path, lines: Mapping[str, Sequence[tuple[float, float]]], labels: Mapping[str, str], meta: Mapping[str, Any]
) -> list[Path]:
    """One line per name, as PNG and SVG beside the JSON file; the model and the machine stand under the title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5 + 0.2 * len(lines)), layout="constrained")
    for (name, points), style in zip(
        lines.items(), itertools.cycle(("o-", "s--", "^-", "v--", "D-", "x--")), strict=False
    ):
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set(xlabel=labels["x"], ylabel=labels["y"], yscale="log")
    where = ", ".join(str(meta[name]) for name in ("model", "dtype", "device", "cpus") if meta.get(name))
    axes.set_title(where + (" cores" if meta.get("cpus") else ""), fontsize="small")
    figure.suptitle(labels["title"])
    axes.grid(True, which="both", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1 if max(map(len, lines), default=0) > MOST_LETTERS else 2)
    paths = [file.with_suffix(ending) for ending in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths
