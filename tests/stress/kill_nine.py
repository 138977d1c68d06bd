"""Kill a process at random points of add, update and delete, open its memory again, and check what is left.

    python tests/stress/kill_nine.py --points 50
    python tests/stress/kill_nine.py --points 3 --engine vllm        a real engine, started anew each time

A point is a call of a Python or C function in the thread that works; the process kills itself there (SIGKILL), so
every part of an operation is hit as often as it makes calls. Prints one JSON object; exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ALICE = {"user_id": "alice"}
OPERATIONS = 6
"""Operations that a child would do if it lived."""


class Letters:
    """Stands in for the embedder: the processes here live for a second, and are not about similarity."""

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        """How often each letter occurs."""
        return [1.0 + text.lower().count(chr(97 + n % 26)) for n in range(384)]

    def embed_batch(self, texts: list[str], memory_action: str | None = None) -> list[list[float]]:
        """See ``embed``."""
        return [self.embed(text) for text in texts]


def open_memory(home: Path, engine: str) -> Any:
    """A memory at ``home``; its embedder is exchanged, all else is real."""
    from inferscale_mem import InferScaleMemory
    from inferscale_mem.testing import FakeEngine

    fake = FakeEngine(answers=lambda plan, sampling: '{"memory": [{"text"') if engine == "fake" else None
    settings = {"home": str(home), "engine": {"kind": "vllm" if fake else engine}}
    memory = InferScaleMemory(inferscale=settings, engine=fake)
    memory.embedding_model = Letters()
    return memory


def work(home: Path, engine: str, seed: int, kill_at: int | None, say: Callable[[dict[str, Any]], None]) -> int:
    """Add, update and delete at random; say what begins and what is done. Returns how many points that took."""
    chance = random.Random(seed)
    memory = open_memory(home, engine)
    memory.service  # noqa: B018  # has the engine started before the first point
    facts = {item["id"]: item["memory"] for item in memory.get_all(filters=ALICE, top_k=1000)["results"]}
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    for number in range(OPERATIONS):
        kind = chance.choice(["add", "add", "update", "delete"] if facts else ["add"])
        fact_id = chance.choice(sorted(facts)) if kind != "add" else None
        text = f"Fact {seed}-{number} is number {chance.random()}."
        say({"begins": kind, "id": fact_id, "text": text})
        sys.setprofile(count)
        if kind == "add":
            fact_id = memory.add(text, infer=chance.random() < 0.5 and engine == "fake", **ALICE)["results"][0]["id"]
        elif kind == "update":
            memory.update(fact_id, text)
        else:
            memory.delete(fact_id)
        sys.setprofile(None)
        facts[fact_id] = text
        if kind == "delete":
            del facts[fact_id]
        handles = {f.id: memory.service.handle(f) for f in memory.service.index.facts()}
        say({"done": kind, "id": fact_id, "text": text, "handles": handles})
    memory.close()
    return calls


def check(home: Path, engine: str, said: list[dict[str, Any]], known: dict[str, str]) -> dict[str, str]:
    """Open what a killed process has left; returns the facts in it. ``known``: those that it began with."""
    with open_memory(home, engine) as memory:
        facts = {item["id"]: item["memory"] for item in memory.get_all(filters=ALICE, top_k=1000)["results"]}
        expected = dict(known)
        for line in said:
            if line.get("done") in ("add", "update"):
                expected[line["id"]] = line["text"]
            elif line.get("done") == "delete":
                del expected[line["id"]]
        cut_off = said[-1] if said and "begins" in said[-1] else {}
        differing = {i for i in facts.keys() | expected.keys() if facts.get(i) != expected.get(i)}
        assert len(differing) <= bool(cut_off), f"acknowledged writes are lost or made up: {differing}"
        for fact_id in differing:
            assert cut_off["begins"] == "add" or fact_id == cut_off["id"], "another fact than the one being written"
            assert facts.get(fact_id) == (None if cut_off["begins"] == "delete" else cut_off["text"])

        rows = memory.db.connection.execute("SELECT DISTINCT memory_id FROM history").fetchall()
        lived = {row[0] for row in rows}
        assert facts.keys() <= lived, f"facts without history: {facts.keys() - lived}"
        for fact_id in lived:
            lines = memory.history(fact_id)
            last = max(lines, key=lambda line: (line["is_deleted"], line["updated_at"] or line["created_at"]))
            assert last["new_memory"] == facts.get(fact_id), f"facts and history differ: {facts.get(fact_id)}, {lines}"
            assert [line["event"] for line in lines].count("ADD") == 1, lines
            changes = {(line["event"], line["old_memory"], line["new_memory"]) for line in lines}
            assert len(changes) == len(lines), f"a line twice: {lines}"

        assert memory.service.wait(300) and memory.service.recorder.failures == {}
        live = {memory.service.handle(fact) for fact in memory.service.index.facts()}
        assert len(live) == len(facts)
        record_id, is_ready = memory.service.planner.record_id, memory.service.recorder.is_ready
        assert all(is_ready(record_id(handle)) for handle in live), "records did not come back"
        seen = {handle for line in said for handle in line.get("handles", {}).values()}
        resolved = memory.service.resolve(sorted(seen | live)).facts
        assert resolved.keys() == live, "a dead handle still stands for something"
        if engine == "fake":
            held = {record.handle for record in memory.service.engine._directory._ready.values() if record.handle}
            assert held == live, "records without a fact"
    return facts


def warm_up() -> None:
    """Import what is imported late: once, here, and not at most of the points."""
    with tempfile.TemporaryDirectory() as home, open_memory(Path(home), "fake") as memory:
        for infer in (False, True):
            fact_id = memory.add("I live in Lyon.", infer=infer, **ALICE)["results"][0]["id"]
            memory.update(fact_id, "I live in Oslo.")
            memory.delete(fact_id)
        memory.service.engine.close()


def forked(call: Callable[[Callable[[Any], None]], Any]) -> tuple[int, list[Any]]:
    """Run in a process of its own: how it ended, and what it said. This process must have no threads."""
    assert threading.active_count() == 1
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            result = call(lambda line: void(os.write(write, json.dumps(line).encode() + b"\n")))
            os.write(write, json.dumps(result).encode() + b"\n")
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        said = [json.loads(line) for line in pipe]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def void(_: object) -> None:
    """Nothing."""


def forked_work(home: Path, seed: int, kill_at: int | None) -> tuple[int, list[Any]]:
    """``work`` on the fake engine."""
    return forked(lambda say: [work(home, "fake", seed, kill_at, say)])


def spawned_work(engine: str, home: Path, seed: int, kill_at: int | None) -> tuple[int, list[Any]]:
    """``work`` with an interpreter of its own: real engines cannot be forked."""
    command = [sys.executable, __file__, "--engine", engine, "--child", str(home), str(seed), str(kill_at or 0)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def checked(home: Path, engine: str, said: list[Any], known: dict[str, str], where: str) -> dict[str, str]:
    """``check``; the fake engine's in a process of its own, since this one must have no threads."""
    if engine != "fake":
        return check(home, engine, said, known)
    status, result = forked(lambda say: check(home, engine, said, known))
    assert status == 0, f"{where}: see above"
    facts: dict[str, str] = result[-1]
    return facts


def main() -> int:
    """Run as described above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=["fake", "vllm", "transformers"], default="fake")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        home, seed, kill_at = given.child
        say = partial(print, flush=True)
        calls = work(Path(home), given.engine, int(seed), int(kill_at) or None, lambda line: say(json.dumps(line)))
        say(json.dumps([calls]))
        return 0
    if given.engine == "fake":
        warm_up()
    started, chance, killed = time.monotonic(), random.Random(given.seed), 0
    during: Counter[str] = Counter()
    run = forked_work if given.engine == "fake" else partial(spawned_work, given.engine)
    with tempfile.TemporaryDirectory(prefix="kill-nine-") as folder:
        status, said = run(Path(folder, "measure"), given.seed, None)
        assert status == 0, f"the program fails without being killed: {said[-1:]}"
        points, home = said[-1][0], Path(folder, "home")
        known: dict[str, str] = {}
        for trial in range(given.points):
            kill_at = chance.randrange(1, points)
            status, said = run(home, given.seed + trial, kill_at)
            said = [line for line in said if isinstance(line, dict)]
            assert status in (-signal.SIGKILL, 0), f"it failed by itself: {status}"
            killed += status == -signal.SIGKILL
            during.update(line["begins"] for line in said[-1:] if "begins" in line)
            known = checked(home, given.engine, said, known, f"after point {kill_at} of seed {given.seed + trial}")
    result = {"engine": given.engine, "killed": killed, "of": given.points, "during": during, "facts_left": len(known)}
    result |= {"points_per_program": points, "seconds": round(time.monotonic() - started, 1)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
