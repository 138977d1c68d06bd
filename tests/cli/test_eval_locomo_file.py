"""Reading the data set, and the figures that need no model."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import locomo_file
import numpy as np
import pytest

from inferscale_mem.cli.eval import locomo, scoring
from inferscale_mem.errors import InputError


def test_facts_come_oldest_first_with_all_their_evidence(tmp_path: Path) -> None:
    file = locomo_file.save(tmp_path)
    (first, second), digest = locomo.read(file)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (first.id, second.id) == ("c-1", "c-2")
    assert [turn.id for turn in first.turns] == ["D2:1", "D2:2", "D2:3", "D10:1", "D10:2"]
    assert [(fact.text, fact.evidence) for fact in first.facts] == [
        ("Ann lives in Lyon.", ("D2:1",)),
        ("Bo bakes bread on Sundays.", ("D2:2", "D2:1")),
        ("Ann bought a red bicycle.", ("D2:3",)),
        ("Ann sold the red bicycle.", ("D10:1", "D2:3")),
        ("Bo has three cats.", ("D10:2",)),
    ]


def test_dates_go_into_the_text_one_way(tmp_path: Path) -> None:
    (first, _), _ = locomo.read(locomo_file.save(tmp_path))
    fact = first.facts[-1]
    assert fact.dated("off") == "Bo has three cats."
    assert fact.dated("behind") == "Bo has three cats. (1 February 2023)"
    assert fact.dated("before") == "1 February 2023: Bo has three cats."


def test_questions_that_have_an_answer(tmp_path: Path) -> None:
    (first, _), _ = locomo.read(locomo_file.save(tmp_path))
    assert [(q.number, q.answer, q.category, q.evidence) for q in first.questions] == [
        (0, "Lyon", 4, ("D2:1",)),
        (1, "31 January 2023", 2, ("D10:1",)),
        (2, "3", 1, ("D10:2", "D2:2")),
        (4, "bread", 4, ()),
    ]


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[1]", '[{"conversation": {}}]', '[{"conversation": {}, "qa": 1}]']
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="--data"):
        locomo.read(file)
    with pytest.raises(InputError, match="cannot be read"):
        locomo.read(tmp_path / "none.json")


def test_an_odd_conversation_is_named(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    odd = locomo_file.conversation("x", "A", "B")
    del odd["conversation"]["session_2_date_time"]
    file.write_text(json.dumps([locomo_file.conversation("y", "A", "B"), odd]), encoding="utf-8")
    with pytest.raises(InputError, match=r"conversation 1 .*session_2_date_time"):
        locomo.read(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"observation": {}}, "no observations"),
        ({"sample_id": "y"}, "two conversations have the sample_id 'y'"),
        ({"qa": [{"question": "?", "answer": {"a": 1}, "category": 4}]}, "answer of question 0 is no text"),
        ({"qa": [{"question": "?", "answer": "\ud800", "category": 4}]}, "surrogates"),
        ({"qa": [{"question": None, "answer": "a", "category": 4}]}, "question is None"),
        *(({"qa": [{"question": "?", "answer": "a", "category": c}]}, "no whole number") for c in (4.9, math.inf, "x")),
        ({"observation": {"session_2_observation": {"Ann": ["ab"]}}}, "list of a text and its turns"),
    ],
)
def test_what_would_give_wrong_figures_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    file = tmp_path / "odd.json"
    odd = {**locomo_file.conversation("x", "A", "B"), **change}
    file.write_text(json.dumps([locomo_file.conversation("y", "A", "B"), odd]), encoding="utf-8")
    with pytest.raises(InputError, match=says):
        locomo.read(file)


def test_names_and_numbers_however_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    one, two = (locomo_file.conversation(name, "A", "B") for name in "xy")
    one["sample_id"] = two["sample_id"] = None
    one["qa"] = [{"question": "?", "answer": "a", "category": "4", "evidence": "D02:01"}]
    file.write_text(json.dumps([one, two]), encoding="utf-8")
    found, _ = locomo.read(file)
    assert [conversation.id for conversation in found] == ["conversation-0", "conversation-1"]
    assert [(q.category, q.evidence) for q in found[0].questions] == [(4, ("D2:1",))]
    file.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(InputError, match="not JSON"):
        locomo.read(file)


def test_questions_are_spread_over_the_list() -> None:
    questions = [locomo.Question(n, "?", "a", 4, ()) for n in range(10)]
    assert [q.number for q in locomo.spread(questions, 2)] == [2, 7]
    assert [q.number for q in locomo.spread(questions[:3], 5)] == [0, 1, 2]
    assert locomo.spread(questions, 0) == locomo.spread([], 3) == []


def test_comparison_of_distributions() -> None:
    text = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    found = scoring.compare(text, other, [0, 1])
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found.kl_first == pytest.approx(first, abs=1e-6)
    assert found.kl_mean == pytest.approx(first / 2, abs=1e-6)
    assert found.dll == pytest.approx(math.log(0.5) / 2, abs=1e-6)
    assert found.top1 == 0.5


def test_tokens_that_cannot_come_add_nothing_to_the_divergence() -> None:
    text = np.array([[0.0, -np.inf]], np.float32)
    assert scoring.divergence(text, np.array([[0.0, -np.inf]], np.float32)).tolist() == [0.0]
    assert scoring.divergence(text, np.log(np.array([[0.5, 0.5]], np.float32)))[0] == pytest.approx(math.log(2))


def test_words_of_answers() -> None:
    assert scoring.token_f1("The red bicycle, I think.", "a red bicycle") == pytest.approx(2 * 2 / (4 + 2))
    assert scoring.token_f1("no", "yes") == 0
    assert scoring.token_f1("", "") == scoring.token_f1("The", "the") == 1
    assert scoring.token_f1("", "A") == scoring.bleu1("", "the") == 0
    assert scoring.bleu1("red red bicycle", "the red bicycle") == pytest.approx(2 / 3)
    assert scoring.bleu1("red", "red bicycle") == pytest.approx(math.exp(-1))
    assert scoring.bleu1("", "red") == 0


def test_recall_of_evidence() -> None:
    assert scoring.recall(["D1:1", "D1:2"], [("D1:1", "D9:9"), ()]) == 0.5
    assert scoring.recall([], [("D1:1",)]) is None


def test_errors_are_clustered_by_conversation() -> None:
    values, clusters = [1.0, 1.0, 3.0, 3.0], ["a", "a", "b", "b"]
    mean, error = scoring.mean_and_error(values, clusters)
    # Two conversations, whose means are 1 and 3: as sure as two values, not as four.
    assert (mean, error) == (2.0, pytest.approx(1.0))
    assert (
        scoring.mean_and_error([1.0, 2.0], ["a", "a"]) == scoring.mean_and_error([1.0, 2.0], ["a", "b"]) == (1.5, 0.5)
    )
    assert scoring.mean_and_error([1.0], ["a"]) == (1.0, None)
    jackknifed = scoring.jackknife_error(
        lambda left_out: float(np.mean([v for v, c in zip(values, clusters, strict=True) if c not in left_out])),
        clusters,
    )
    assert jackknifed == pytest.approx(1.0)


def test_closed_share_of_the_gap() -> None:
    assert scoring.closed(0.25, 1.0) == 0.75
    assert scoring.closed(0.0, 0.0) is None
