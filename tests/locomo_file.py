"""A made-up file of LoCoMo's form, with the oddities of the real one. Its people and facts are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def conversation(name: str, one: str, two: str) -> dict[str, Any]:
    """Two sessions of two people, with facts and questions of every category."""
    return {
        "sample_id": name,
        "conversation": {
            "speaker_a": one,
            "speaker_b": two,
            "session_10_date_time": "12:48 am on 1 February, 2023",
            "session_10": [
                {"speaker": one, "dia_id": "D10:1", "text": "I sold my red bicycle yesterday."},
                {"speaker": two, "dia_id": "D10:2", "text": "My three cats say hello!"},
            ],
            "session_2_date_time": "1:56 pm on 8 May, 2022",
            "session_2": [
                {"speaker": one, "dia_id": "D2:1", "text": "I live in Lyon now."},
                {"speaker": two, "dia_id": "D2:2", "text": "I bake bread on Sundays."},
                {"speaker": one, "dia_id": "D2:3", "text": "And I bought a red bicycle."},
            ],
            "session_11_date_time": "9:00 am on 2 March, 2023",
        },
        "observation": {
            "session_2_observation": {
                one: [[f"{one} bought a red bicycle.", "D2:3"], [f"{one} lives in Lyon.", "D2:1"]],
                two: [[f"{two} bakes bread on Sundays.", ["D2:2", "D2:1"]]],
            },
            "session_10_observation": {
                one: [[f"{one} sold the red bicycle.", "D10:1, D2:3"]],
                two: [[f"{two} has three cats.", "D:10:2"]],
            },
        },
        "qa": [
            {"question": f"Where does {one} live?", "answer": "Lyon", "evidence": ["D2:1"], "category": 4},
            {"question": f"When did {one} sell the bicycle?", "answer": "31 January 2023", "evidence": ["D10:1"],
             "category": 2},
            {"question": f"How many cats does {two} have?", "answer": 3, "evidence": ["D10:2; D2:2"], "category": 1},
            {"question": "Is it true?", "adversarial_answer": "no", "evidence": ["D2:1"], "category": 5},
            {"question": f"What does {two} bake?", "answer": "bread", "evidence": ["D"], "category": 4},
            {"question": "Nobody wrote down the answer?", "evidence": [], "category": 3},
        ],
    }  # fmt: skip


def save(folder: Path) -> Path:
    """The file: two conversations."""
    file = folder / "locomo.json"
    file.write_text(json.dumps([conversation("c-1", "Ann", "Bo"), conversation("c-2", "Cy", "Di")]), encoding="utf-8")
    return file
