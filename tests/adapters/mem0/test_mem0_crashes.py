"""What a process that dies leaves behind: facts and their history agree again when the memory is next opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mem0.memory.storage import SQLiteManager

from inferscale_mem import InferScaleMemory
from inferscale_mem.adapters.mem0.history import repair
from inferscale_mem.adapters.mem0.journal import ALL, LONG, Journal

ALICE = {"user_id": "alice"}
PROGRAM = Path(__file__).parents[2] / "stress" / "kill_nine.py"


def test_killed_at_random_points() -> None:
    """Some of the points; all 50 of them: python tests/stress/kill_nine.py --points 50."""
    done = subprocess.run([sys.executable, str(PROGRAM), "--points", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["killed"] >= 5


def die(memory: InferScaleMemory) -> None:
    """Leave everything as a killed process does: nothing is closed in good order."""
    journal = memory._core.journal
    assert journal._file is not None and journal._open
    memory._raw_store.client.close()
    memory.db.close()
    journal._open["kept"] = 1  # so that closing it leaves the file
    journal.close()


def failing(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("event", ["ADD", "UPDATE", "DELETE"])
def test_a_line_of_history_that_was_never_written(
    open_memory: Any, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    memory = open_memory()
    fact = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    monkeypatch.setattr(memory.db, "add_history", failing)
    with pytest.raises(KeyboardInterrupt):
        if event == "ADD":
            memory.add("I have two cats.", infer=False, **ALICE)
        elif event == "UPDATE":
            memory.update(fact, "I live in Oslo.")
        else:
            memory.delete(fact)
    die(memory)
    again = open_memory()
    facts = {item["id"]: item["memory"] for item in again.get_all(filters=ALICE)["results"]}
    written = [fact, *(facts.keys() - {fact})]
    events = {row: [(line["event"], line["new_memory"]) for line in again.history(row)] for row in written}
    expected = {
        "ADD": {fact: [("ADD", "I live in Lyon.")], written[-1]: [("ADD", "I have two cats.")]},
        "UPDATE": {fact: [("ADD", "I live in Lyon."), ("UPDATE", "I live in Oslo.")]},
        "DELETE": {fact: [("ADD", "I live in Lyon."), ("DELETE", None)]},
    }
    if event == "ADD":
        expected["ADD"][fact] = [("ADD", "I live in Lyon.")]
    assert events == expected[event]
    again.close()
    assert not list(Path(again.config.history_db_path).parent.glob("*.writing"))


def test_a_reset_that_was_interrupted_is_finished(open_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mem0 empties the history first: facts without any history would be left."""
    memory = open_memory()
    memory.add("I live in Lyon.", infer=False, **ALICE)
    monkeypatch.setattr(memory.vector_store, "reset", failing)
    monkeypatch.setattr(memory._core.journal, "done", lambda rows: None)  # it dies before it comes to that
    with pytest.raises(KeyboardInterrupt):
        memory.reset()
    die(memory)
    again = open_memory()
    assert again.get_all(filters=ALICE)["results"] == []
    fact = again.add("I live in Oslo.", infer=False, **ALICE)["results"][0]["id"]
    assert len(again.history(fact)) == 1


def test_nothing_is_left_open_in_good_order(open_memory: Any) -> None:
    memory = open_memory()
    fact = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    memory.update(fact, "I live in Oslo.")
    memory.delete(fact)
    memory.add("I have two cats.", infer=False, **ALICE)
    memory.delete_all(**ALICE)
    memory.reset()
    memory.add("I have two cats.", infer=False, **ALICE)
    assert memory._core.journal._open == {}
    assert memory._core.journal._path.read_bytes() == b""


def test_repair_leaves_alone_what_is_complete(memory: InferScaleMemory) -> None:
    fact = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    gone = memory.add("I have two cats.", infer=False, **ALICE)["results"][0]["id"]
    memory.update(fact, metadata={"checked": True})
    memory.delete(gone)
    before = [memory.history(row) for row in (fact, gone)]
    assert repair(memory.vector_store, memory.db, [fact, gone, "0" * 32]) == 0
    assert [memory.history(row) for row in (fact, gone)] == before
    assert isinstance(memory.db, SQLiteManager)


# The journal.


def left_by(journal: Journal) -> Journal:
    """As after the death of its process."""
    journal._open["kept"] = 1
    journal.close()
    return journal


def test_the_journal_tells_what_was_not_done(tmp_path: Path) -> None:
    first = Journal(tmp_path / "history.db")
    first.begin(["a", "b", "c", "c"])
    first.done(["b", "c"])
    left_by(first)
    second = Journal(tmp_path / "history.db")
    second.begin(["d"])
    third = Journal(tmp_path / "history.db")
    with pytest.raises(KeyboardInterrupt), third.interrupted() as rows:
        assert rows == {"a", "c"}, "those of a living process are its own"
        raise KeyboardInterrupt
    with third.interrupted() as rows:
        assert rows == {"a", "c"}, "not repaired, not forgotten"
    with third.interrupted() as rows:
        assert rows == set()
    second.done(["d"])
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_off_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "history.db.0.writing").write_bytes(b"+a\n+b\n-a\n-")
    with Journal(tmp_path / "history.db").interrupted() as rows:
        assert rows == {"b"}


def test_the_file_does_not_grow(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "history.db")
    journal.begin(["stays", ALL])
    for number in range(LONG // 4):
        journal.begin([str(number)])
        journal.done([str(number)])
    assert journal._path is not None and journal._path.stat().st_size < LONG + 100
    left_by(journal)
    with Journal(tmp_path / "history.db").interrupted() as rows:
        assert rows == {"stays", ALL}


def test_a_history_in_memory_needs_none(tmp_path: Path) -> None:
    journal = Journal(None)
    journal.begin(["a"])
    with journal.interrupted() as rows:
        assert rows == set()
    journal.close()
