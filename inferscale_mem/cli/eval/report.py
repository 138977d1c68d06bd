"""What an evaluation prints and writes: a table, JSON, a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inferscale_mem.cli.bench.report import table, write_json, write_pictures
from inferscale_mem.cli.eval.log import ANSWER, Log
from inferscale_mem.cli.eval.memories import ALONE
from inferscale_mem.cli.eval.summary import PLAIN, Row, by_category, by_half, rows

HEADS = (
    *("k", "policy", "text tail", "n", "ΔLL/token", "KL", "less default's", "KL first", "top-1", "F1", "BLEU-1"),
    *("closed KL %", "closed LL %", "tokens/fact", "ms/fact", "answer ms"),
)
PICTURE = {"title": "How far answers are from plain prefill", "x": "facts in the prompt", "y": "KL, nats a token"}
TAILS = {"title": "What a text tail costs and gives", "x": "time to first token, ms", "y": "KL, nats a token"}
DIGITS = 6


def shown(log: Log) -> str:
    """The rows over all questions as a table."""
    return table(HEADS, [_cells(row) for row in rows(log)])


def write(file: Path, log: Log, meta: Mapping[str, Any]) -> list[Path]:
    """The JSON file, and pictures beside it."""
    every = rows(log)
    result = {
        "rows": _rounded(every),
        "by_category": _rounded(by_category(log)),
        "by_half": _rounded(by_half(log)),
        "meta": {**meta, "questions": _questions(log)},
    }
    written = [write_json(file, result), *write_pictures(file, _lines(every), PICTURE, meta)]
    if curves := _tail_curves(every):
        written += write_pictures(file.with_name(f"{file.stem}-ttft{file.suffix}"), curves, TAILS, meta)
    return written


def _questions(log: Log) -> dict[str, int]:
    """Per conversation, how many questions the rows are about."""
    asked = {(line["conversation"], line["question"]) for line in log.lines(ANSWER)}
    return dict(sorted(Counter(conversation for conversation, _ in asked).items()))


def _cells(row: Row) -> list[str]:
    return [
        str(row["k"]),
        row["policy"],
        "" if row["policy"] in PLAIN else str(row["text_tail"]),
        str(row["n"]),
        _with_error(row, "dll", "+.3f"),
        _with_error(row, "kl_mean", ".4f"),
        "-" if row["kl_less_default"] is None else _with_error(row, "kl_less_default", "+.4f"),
        *(_cell(row[name], ".3f") for name in ("kl_first", "top1", "f1", "bleu1")),
        *(_cell(None if row[name] is None else 100 * row[name], ".1f") for name in ("closed_kl", "closed_ll")),
        *(_cell(row[name], ".1f") for name in ("encode_tokens_per_fact", "encode_ms_per_fact", "answer_ms")),
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _with_error(row: Row, name: str, form: str) -> str:
    error = row[f"{name}_se"]
    return format(row[name], form) + ("" if error is None else f" ±{error:{form.lstrip('+')}}")


def _rounded(every: Sequence[Row]) -> list[Row]:
    return [{k: round(v, DIGITS) if isinstance(v, float) else v for k, v in row.items()} for row in every]


def _lines(every: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """KL against the facts in the prompt, by condition; what is exactly 0 has no place on a logarithmic axis.

    Points of unlike numbers of questions are not joined: they are about other questions.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in every:
        if row["kl_mean"] > 0:
            tail = f", text tail {row['text_tail']}" if row["text_tail"] else ""
            line = lines.setdefault(f"{row['policy']}{tail} (n={row['n']})", [])
            line.append((row["facts"] or row["k"], row["kl_mean"]))
    return lines


def _tail_curves(every: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """KL against time to the first token, a line per policy and k: its points are text tails."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in every:
        if row["policy"] not in (*PLAIN, ALONE) and row["ttft_ms"] is not None and row["kl_mean"] > 0:
            name = f"{row['policy']}, k={row['k']} (n={row['n']})"
            curves.setdefault(name, []).append((row["ttft_ms"], row["kl_mean"]))
    return {name: sorted(points) for name, points in curves.items() if len(points) > 1}
