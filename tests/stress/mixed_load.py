"""16 threads, then 200 tasks of one event loop, add, search, update and delete at once on embedded Qdrant.

    python tests/stress/mixed_load.py --seconds 60

Each worker keeps count of what it was told is stored. At the end facts, history and records are compared with that:
nothing lost, nothing made up, no exception, each live fact has a record or a reason, no record without a fact. Prints
JSON, a line each; exits with 1 if anything is wrong. Memory, embedder and Qdrant are real, the engine is the fake one.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.testing import FakeEngine

SHARED = "everyone"
"""An owner whose one fact all workers update."""


class Worker:
    """One user, who mixes operations.

    Args:
        call: calls a method of the memory by name.
        name: user id.
        shared: id of the fact of ``SHARED``.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], name: str, shared: str) -> None:
        self.call, self.name, self.shared = call, name, shared
        self.chance = random.Random(name)
        self.facts: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None

    async def run(self, until: float) -> None:
        """Work until that time (of ``time.monotonic``)."""
        try:
            while time.monotonic() < until:
                kind = self.chance.choice(["add", "add", "search", "update", "delete", "update_shared"])
                if kind in ("update", "delete") and not self.facts:
                    kind = "add"
                await getattr(self, kind)(f"{self.name} has seen number {self.chance.random()}.")
                self.done[kind] += 1
        except BaseException as error:
            self.error = error

    async def add(self, text: str) -> None:
        """Add a fact of one's own."""
        added = await self.call("add", text, user_id=self.name, infer=False)
        self.facts[added["results"][0]["id"]] = text

    async def search(self, text: str) -> None:
        """All of one's facts are found, and nobody else's."""
        found = await self.call("search", text, filters={"user_id": self.name}, top_k=5, threshold=0.0)
        ids = [hit["id"] for hit in found["results"]]
        assert len(ids) == min(5, len(self.facts)) and set(ids) <= self.facts.keys(), "lost, or another's"
        texts = await self.call("resolve", [hit["memory"] for hit in found["results"]])
        assert texts == [self.facts[fact_id] for fact_id in ids], "a handle stands for another text"

    async def update(self, text: str) -> None:
        """Change one of one's own."""
        fact_id = self.chance.choice(sorted(self.facts))
        await self.call("update", fact_id, text)
        self.facts[fact_id] = text

    async def delete(self, text: str) -> None:
        """Delete one of one's own."""
        fact_id = self.chance.choice(sorted(self.facts))
        await self.call("delete", fact_id)
        del self.facts[fact_id]

    async def update_shared(self, text: str) -> None:
        """Change the fact that everybody changes."""
        await self.call("update", self.shared, text)


def in_threads(memory: InferScaleMemory, count: int, seconds: float, shared: str) -> list[Worker]:
    """Workers in threads."""

    async def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(memory, name)(*args, **kwargs)

    workers = [Worker(call, f"thread-{number}", shared) for number in range(count)]
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=lambda w=worker: asyncio.run(w.run(until))) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return workers


def in_tasks(memory: AsyncInferScaleMemory, count: int, seconds: float, shared: str) -> list[Worker]:
    """Workers in tasks of one event loop."""

    async def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(memory, name)(*args, **kwargs)

    async def everyone() -> list[Worker]:
        workers = [Worker(call, f"task-{number}", shared) for number in range(count)]
        until = time.monotonic() + seconds
        await asyncio.gather(*(worker.run(until) for worker in workers))
        return workers

    return asyncio.run(everyone())


def check(memory: Any, workers: list[Worker], shared: str) -> dict[str, Any]:
    """Compare what there is with what the workers were told; figures for the report."""
    errors = [repr(worker.error) for worker in workers if worker.error]
    assert not errors, f"{len(errors)} workers failed: {errors[:3]}"
    service = memory.service
    expected = {fact_id: text for worker in workers for fact_id, text in worker.facts.items()}
    known = {fact.id: fact.text for fact in service.index.facts()}
    stored = {row_id: payload["data"] for row_id, payload, _ in memory._raw_store.rows()}
    assert known == stored, "the index and the store differ"
    assert {**expected, shared: known.get(shared)} == known, "facts are lost, made up, or differ"
    lines: dict[str, list[Any]] = {}
    query = "SELECT memory_id, event, new_memory FROM history ORDER BY rowid"
    for fact_id, *line in memory.db.connection.execute(query):
        lines.setdefault(fact_id, []).append(line)
    alive = {fact_id for fact_id, events in lines.items() if events[-1][0] != "DELETE"}
    assert alive == known.keys(), "facts and history differ"
    assert all(lines[fact_id][-1][1] == text for fact_id, text in expected.items()), "history knows another text"
    assert service.wait(600), "facts were left without a record"
    live = {service.handle(fact) for fact in service.index.facts()}
    ready = {handle for handle in live if service.recorder.is_ready(service.planner.record_id(handle))}
    reasons = {handle for handle in live - ready if service.recorder.failure(handle)}
    assert live == ready | reasons, f"{len(live - ready - reasons)} facts have neither a record nor a reason"
    held = {record.handle for record in service.engine._directory._ready.values() if record.handle}
    assert held == ready, "records without a fact"
    done = sum((worker.done for worker in workers), Counter())
    return {**done, "facts": len(live), "records": len(ready), "reasons": len(reasons)}


def run(kind: Any, drive: Any, count: int, seconds: float, home: Path) -> dict[str, Any]:
    """One kind of memory under load."""
    engine = FakeEngine(record_bytes=1 << 30)
    memory = kind(inferscale={"home": str(home)}, engine=engine)
    try:
        added = memory.add("I am shared.", user_id=SHARED, infer=False)
        added = asyncio.run(added) if inspect.iscoroutine(added) else added
        shared = added["results"][0]["id"]
        return check(memory, drive(memory, count, seconds, shared), shared)
    finally:
        memory.close()
        engine.close()


def main() -> int:
    """Run as described above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each part")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mixed-load-") as folder:
        threads = run(InferScaleMemory, in_threads, given.threads, given.seconds, Path(folder, "threads"))
        print(json.dumps({"threads": given.threads, "seconds": given.seconds, **threads}), flush=True)
        tasks = run(AsyncInferScaleMemory, in_tasks, given.tasks, given.seconds, Path(folder, "tasks"))
        print(json.dumps({"tasks": given.tasks, "seconds": given.seconds, **tasks}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
