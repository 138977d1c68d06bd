"""The log of an evaluation: whatever stops its writer, what was measured is still there, once, and of one kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_mem.cli.eval.log import ANSWER, Log
from inferscale_mem.errors import ConfigError

MADE_WITH = {"instruction": "a\u2028b"}


def answer(number: int) -> dict[str, object]:
    return {
        "conversation": "c",
        "question": number,
        "policy": "text",
        "text_tail": 0,
        "k": 1,
        "category": 4,
        **dict.fromkeys(("ll", "dll", "kl_mean", "kl_first", "top1"), 0.5),
        "answer": "\u2028\x85\u00e9",
    }


def written(file: Path, *numbers: int) -> Path:
    with Log(file, MADE_WITH) as log:
        for number in numbers:
            log.add(ANSWER, answer(number))
    return file


def held(file: Path) -> list[int]:
    with Log(file, MADE_WITH) as log:
        return sorted(line["question"] for line in log.lines(ANSWER))


def test_it_survives_whatever_stops_its_writer(tmp_path: Path) -> None:
    file = written(tmp_path / "log.jsonl", 0, 1, 2)
    whole = file.read_bytes()
    for end in range(len(whole)):  # cut off anywhere, the first line included
        file.write_bytes(whole[:end])
        complete = whole[: end + 1].count(b"\n")
        assert held(file) == held(file) == list(range(max(0, complete - 1)))
    file.write_bytes("\u00e9".encode()[:1] + b"\n" + whole)
    assert held(file) == [0, 1, 2]


@pytest.mark.parametrize(
    "damaged",
    [
        *('{"kind": "answer"}', '{"kind": ["x"]}', '{"kind": "verdict", "conversation": "c"}'),
        '{"kind": "answer", "conversation": ["c"], "question": 7, "policy": "text", "text_tail": 0, "k": 1}',
        '{"kind": "answer", "conversation": "c", "question": 7, "policy": "text", "text_tail": 0, "k": 1, "dll": 0}',
    ],
)
def test_a_damaged_line_counts_as_none(tmp_path: Path, damaged: str) -> None:
    file = written(tmp_path / "log.jsonl", 0)
    file.write_text(file.read_text(encoding="utf-8") + damaged + "\n", encoding="utf-8")
    assert held(file) == [0]


def test_where_no_log_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Log(tmp_path / "none" / "log.jsonl", MADE_WITH)


def test_logs_of_one_kind_can_be_put_together(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.jsonl", 0), written(tmp_path / "2.jsonl", 1)
    one.write_bytes(one.read_bytes() + two.read_bytes())
    assert held(one) == [0, 1]
    with Log(tmp_path / "3.jsonl", {"instruction": "c"}):
        pass
    one.write_bytes(one.read_bytes() + (tmp_path / "3.jsonl").read_bytes())
    with pytest.raises(ConfigError, match="instruction="):
        held(one)


def test_a_file_that_is_no_log_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"kind": "answer"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="does not say"):
        held(file)
    assert file.read_text(encoding="utf-8") == '{"kind": "answer"}\n'


def test_it_has_one_writer(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    with Log(file, MADE_WITH), pytest.raises(ConfigError, match="Another evaluation"):
        held(file)
    assert held(file) == []
