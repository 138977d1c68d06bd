"""From the log's lines to rows: means over questions, standard errors, shares of the gap that is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from inferscale_mem.cli.eval.asking import AGAIN, NONE, TEXT
from inferscale_mem.cli.eval.locomo import CATEGORIES
from inferscale_mem.cli.eval.log import ANSWER, ENCODED, VERDICT, Line, Log
from inferscale_mem.cli.eval.memories import ALONE
from inferscale_mem.cli.eval.scoring import closed, jackknife_error, mean_and_error
from inferscale_mem.config import EncodingConfig
from inferscale_mem.encoding import parse_policy

Row = dict[str, Any]

WITH_ERROR = ("dll", "kl_mean")
MEANS = ("ll", "kl_first", "top1", "f1", "bleu1", "recall", "facts", "prompt_tokens", "answer_ms", "ttft_ms")
LESS_DEFAULT = ("kl_less_default", "kl_less_default_se", "kl_less_default_n")
"""KL less that of the default policy with the same text tail, over the questions that both were asked."""
PLAIN = (TEXT, AGAIN, NONE)


class Answers:
    """All answers, found by condition."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._by: dict[tuple[str, int, int], list[Line]] = {}
        for line in lines:
            self._by.setdefault((line["policy"], line["text_tail"], line["k"]), []).append(line)

    @property
    def conditions(self) -> list[tuple[str, int, int]]:
        """(policy, text_tail, k) in the order they are shown in: by k, plain text first."""
        lead = {TEXT: 0, AGAIN: 1, NONE: 2, ALONE: 3}
        return sorted(self._by, key=lambda c: (c[2], lead.get(c[0], 4)))

    def of(self, policy: str, text_tail: int, k: int) -> list[Line]:
        """A condition's lines."""
        return self._by.get((policy, text_tail, k), [])


def rows(log: Log, keep: Callable[[Line], bool] = lambda line: True) -> list[Row]:
    """One row per condition, over those lines that ``keep`` lets through."""
    answers = Answers(line for line in log.lines(ANSWER) if keep(line))
    encoded, verdicts = log.lines(ENCODED), log.lines(VERDICT)
    return [_row(answers, condition, encoded, verdicts) for condition in answers.conditions]


def by_category(log: Log) -> list[Row]:
    """As ``rows``, for each category on its own."""
    return [
        {"category": number, "category_name": name, **row}
        for number, name in CATEGORIES.items()
        for row in rows(log, lambda line, number=number: line["category"] == number)  # type: ignore[misc]
    ]


def by_half(log: Log) -> list[Row]:
    """As ``rows``, for every other conversation: does the ranking of policies hold where it was not chosen?"""
    names = sorted({line["conversation"] for line in log.lines(ANSWER)})
    return [
        {"half": half + 1, "conversations": names[half::2], **row}
        for half in (range(2) if len(names) > 1 else ())
        for row in rows(log, lambda line, half=half: line["conversation"] in names[half::2])  # type: ignore[misc]
    ]


def _row(answers: Answers, condition: tuple[str, int, int], encoded: list[Line], verdicts: list[Line]) -> Row:
    policy, text_tail, k = condition
    lines = answers.of(*condition)
    clusters = [line["conversation"] for line in lines]
    row: Row = {"policy": policy, "k": k, "text_tail": text_tail, "n": len(lines)}
    for name in WITH_ERROR:
        row[name], row[f"{name}_se"] = mean_and_error([line[name] for line in lines], clusters)
    row.update({name: _mean(line.get(name) for line in lines) for name in MEANS})
    row["f1_n"] = sum("f1" in line for line in lines)
    row["f1_less_text"], row["f1_less_text_se"], _ = _paired(lines, answers.of(TEXT, 0, k), "f1")
    default = answers.of(parse_policy(EncodingConfig().policy).name, text_tail, k) if policy not in PLAIN else []
    row.update(zip(LESS_DEFAULT, _paired(lines, default, "kl_mean"), strict=True))
    row["judged_right"] = _judged(lines, verdicts)
    row.update(_closed(lines, answers.of(ALONE, 0, k) if policy not in PLAIN else []))
    row.update(_encoding([line for line in encoded if line["policy"] == policy]))
    return row


def _closed(lines: Sequence[Line], alone: Sequence[Line]) -> Row:
    """Shares of the gap between ALONE (0) and plain prefill (1), over questions that both have."""
    base = {_question(line): line for line in alone}
    pairs = [(line, base[_question(line)]) for line in lines if _question(line) in base]

    def share(name: str, without: frozenset[str] = frozenset()) -> float | None:
        kept = [(one[name], two[name]) for one, two in pairs if one["conversation"] not in without]
        value, gap = (sum(values) for values in zip(*kept, strict=True)) if kept else (0.0, 0.0)
        # Where records of facts on their own are no worse than plain prefill, there is no gap in likelihood.
        return closed(value, gap) if name == "kl_mean" or gap < 0 else None

    error = jackknife_error(lambda without: share("kl_mean", without), [one["conversation"] for one, _ in pairs])
    return {"closed_kl": share("kl_mean"), "closed_kl_se": error, "closed_ll": share("dll")}


def _encoding(encoded: Sequence[Line]) -> Row:
    facts = sum(line["facts"] for line in encoded)
    own = sum(line["own_tokens"] for line in encoded)
    prefilled = sum(line["tokens_prefilled"] for line in encoded)
    return {
        "encode_tokens_per_fact": prefilled / facts if facts else None,
        "encode_tokens_per_own": prefilled / own if own else None,
        "encode_ms_per_fact": sum(line["ms"] for line in encoded) / facts if facts else None,
        "encode_again_per_delete": _mean(line.get("again_per_delete") for line in encoded),
    }


def _judged(lines: Sequence[Line], verdicts: Sequence[Line]) -> dict[str, float | None]:
    """Judge -> share that it found right of the answers on which it gave a verdict."""
    names = {_name(line) for line in lines}
    said: dict[str, list[float | None]] = {}
    for verdict in verdicts:
        if _name(verdict) in names:
            said.setdefault(verdict["judge"], []).append(verdict["accepted"])
    return {judge: _mean(values) for judge, values in said.items()}


def _paired(lines: Sequence[Line], others: Sequence[Line], name: str) -> tuple[float | None, float | None, int]:
    """Mean difference to others over the questions that both have, its standard error, and how many these are."""
    base = {_question(line): line[name] for line in others if name in line}
    both = [line for line in lines if name in line and _question(line) in base]
    if not both:
        return None, None, 0
    differences = [line[name] - base[_question(line)] for line in both]
    return *mean_and_error(differences, [line["conversation"] for line in both]), len(both)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _question(line: Line) -> tuple[str, int]:
    return line["conversation"], line["question"]


def _name(line: Line) -> tuple[Any, ...]:
    return line["conversation"], line["question"], line["policy"], line["text_tail"], line["k"]
