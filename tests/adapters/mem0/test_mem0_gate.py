"""reset() and close() while others are at work; and what else comes in between."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.adapters.mem0 import core as core_module
from inferscale_mem.adapters.mem0.gate import Gate
from inferscale_mem.adapters.mem0.history import History
from inferscale_mem.adapters.mem0.store import FactStore
from inferscale_mem.errors import StoreError

ALICE = {"user_id": "alice"}
SOON = 0.2
"""Seconds after which something that has not happened is waiting."""


class Threads(ThreadPoolExecutor):
    """Each thing done by one of these is an operation of its own, also if it leaves the gate somewhere else."""

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        return super().submit(contextvars.Context().run, call, *args, **kwargs)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with Threads(16) as pool:
        yield pool


def quick(memory: Any) -> Any:
    """The same memory with an embedder that takes no time."""

    def embed(*args: Any, **kwargs: Any) -> list[float]:
        return [random.gauss(0, 1) for _ in range(384)]

    memory.embedding_model.embed = embed
    memory.embedding_model.embed_batch = lambda texts, *args, **kwargs: [embed() for _ in texts]
    return memory


def held_up(memory: Any) -> tuple[threading.Event, threading.Event]:
    """Has whoever embeds wait: (somebody does, they may go on)."""
    waits, go_on, embed = threading.Event(), threading.Event(), memory.embedding_model.embed

    def slow(*args: Any, **kwargs: Any) -> Any:
        waits.set()
        assert go_on.wait(30)
        return embed(*args, **kwargs)

    memory.embedding_model.embed = slow
    memory.embedding_model.embed_batch = lambda texts, *args, **kwargs: [slow() for _ in texts]
    return waits, go_on


def listed(memory: InferScaleMemory) -> list[str]:
    """Ids of all of Alice's facts; each has its line of history."""
    ids = [fact["id"] for fact in memory.get_all(filters=ALICE, top_k=100_000)["results"]]
    assert all([line["event"] for line in memory.history(row)] == ["ADD"] for row in ids)
    return ids


# What comes after an operation.


def test_encoding_begins_when_the_fact_has_its_history(memory: InferScaleMemory) -> None:
    add_history, pending = memory.db.add_history, []

    def watched(*args: Any, **kwargs: Any) -> None:
        pending.append(memory.service.recorder.pending)
        add_history(*args, **kwargs)

    memory.db.add_history = watched
    memory.add("I keep bees", **ALICE, infer=False)
    assert pending == [0]
    assert memory.service.wait(30) and memory.service.recorder.counters["encoded"] == 1


async def test_the_same_in_the_async_memory(async_memory: AsyncInferScaleMemory) -> None:
    add_history, pending = async_memory.db.add_history, []

    def watched(*args: Any, **kwargs: Any) -> None:
        pending.append(async_memory.service.recorder.pending)
        add_history(*args, **kwargs)

    async_memory.db.add_history = watched
    await async_memory.add("I keep bees", **ALICE, infer=False)
    assert pending == [0]
    assert await asyncio.to_thread(async_memory.service.wait, 30)
    assert async_memory.service.recorder.counters["encoded"] == 1


# The gate.


def test_many_or_one_alone(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    first = gate.enter()
    gate.leave(threads.submit(gate.enter).result(10))  # many may be inside
    alone = threads.submit(lambda: gate.enter(alone=True))
    time.sleep(SOON)
    late = threads.submit(gate.enter)
    time.sleep(SOON)
    assert not alone.done() and not late.done(), "who comes later does not overtake"
    gate.leave(first)
    time.sleep(SOON)
    assert alone.done() and not late.done()
    gate.leave(alone.result())
    gate.leave(late.result(10))
    assert gate.emptied(0)


def test_an_operation_inside_another_does_not_wait(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    outer = gate.enter()
    alone = threads.submit(lambda: gate.enter(alone=True))
    time.sleep(SOON)
    for _ in range(2):
        gate.leave(gate.enter())
    with pytest.raises(StoreError, match="inside another operation"):
        gate.enter(alone=True)
    assert gate.emptied(0) is False, "and does not wait for itself"
    gate.leave(outer)
    gate.leave(alone.result(10))
    inside = gate.enter(alone=True)
    gate.leave(gate.enter(alone=True))
    gate.leave(gate.enter())
    gate.leave(inside)
    other = Gate()
    with pytest.raises(StoreError, match="closed"):
        other.shut()
        other.enter()


def test_what_is_put_off_waits_for_the_whole_operation(threads: ThreadPoolExecutor) -> None:
    gate, done = Gate(), []
    gate.afterwards(lambda: done.append("outside"))
    assert done == ["outside"], "nothing is put off where no operation is under way"
    outer = gate.enter()
    inner = gate.enter()
    gate.afterwards(lambda: done.append("inside"))
    threads.submit(gate.afterwards, lambda: done.append("elsewhere")).result(10)
    gate.leave(inner)
    assert done == ["outside", "elsewhere"]
    gate.leave(outer)
    assert done == ["outside", "elsewhere", "inside"]
    gate.afterwards(lambda: done.append("too late"))  # a task may outlive the operation that began it
    assert done[-1] == "too late"


def test_once_shut_nobody_enters(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    inside = threads.submit(gate.enter).result(10)
    waiting = threads.submit(lambda: gate.enter(alone=True))
    time.sleep(SOON)
    gate.shut()
    with pytest.raises(StoreError, match="closed"):
        waiting.result(10)
    with pytest.raises(StoreError, match="closed"):
        gate.enter()
    assert not gate.emptied(0.05)
    emptied = threads.submit(gate.emptied, 30)
    gate.leave(inside)
    assert emptied.result(10)


async def test_the_event_loop_goes_on_while_somebody_waits() -> None:
    """And who is cancelled meanwhile stands in nobody's way."""
    gate = Gate()
    inside = await asyncio.to_thread(gate.enter)
    alone = asyncio.create_task(gate.enter_async(alone=True))
    await asyncio.sleep(SOON)
    late = asyncio.create_task(gate.enter_async())
    await asyncio.sleep(SOON)
    assert not alone.done() and not late.done()
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    gate.leave(await asyncio.wait_for(late, 10))
    again = asyncio.create_task(gate.enter_async(alone=True))
    await asyncio.sleep(SOON)
    gate.leave(inside)  # it is let in, and cancelled before it knows
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    assert gate.emptied(0)


async def test_a_task_that_outlives_its_operation_waits_like_all() -> None:
    gate = Gate()
    may = asyncio.Event()

    async def later() -> None:
        await may.wait()
        gate.leave(await gate.enter_async())

    outer = await gate.enter_async()
    task = asyncio.create_task(later())
    await asyncio.sleep(0)
    gate.leave(outer)
    alone = await asyncio.to_thread(lambda: gate.enter(alone=True))
    may.set()
    await asyncio.sleep(SOON)
    assert not task.done()
    gate.leave(alone)
    await asyncio.wait_for(task, 10)


# The history.


def test_the_history_is_closed_when_nobody_uses_it(memory: InferScaleMemory, threads: ThreadPoolExecutor) -> None:
    """SQLite crashes the process else."""
    history = memory.db
    used = threading.Event()
    go_on = threading.Event()

    def use() -> None:
        with history._lock:
            used.set()
            assert go_on.wait(30)
            history.connection.execute("SELECT 1")

    user = threads.submit(use)
    assert used.wait(10)
    closing = threads.submit(history.close)
    time.sleep(SOON)
    assert not closing.done()
    go_on.set()
    user.result(10)
    closing.result(10)
    history.close()
    for call in (lambda: history.add_history("x", None, "y", "ADD"), lambda: history.get_history("x")):
        with pytest.raises(StoreError, match="closed"):
            call()
    History.__new__(History).close()  # as __del__ does with one that was never made whole


# Both memories.


def adding(memory: InferScaleMemory, until: threading.Event) -> list[str]:
    errors = []
    while not until.is_set():
        try:
            memory.add("I live in Lyon.", infer=False, **ALICE)
        except StoreError as error:
            errors.append(str(error))
    return errors


def test_reset_while_threads_add(memory: InferScaleMemory, threads: ThreadPoolExecutor) -> None:
    quick(memory)
    stop = threading.Event()
    adders = [threads.submit(adding, memory, stop) for _ in range(4)]
    for _ in range(5):
        time.sleep(0.05)
        memory.reset()
    stop.set()
    assert [adder.result(30) for adder in adders] == [[]] * 4
    listed(memory)
    memory.reset()
    assert listed(memory) == []


def test_close_while_threads_add(open_memory: Any, threads: ThreadPoolExecutor) -> None:
    for _ in range(3):
        memory = quick(open_memory())
        stop = threading.Event()
        adders = [threads.submit(adding, memory, stop) for _ in range(4)]
        time.sleep(0.2)
        memory.close()
        stop.set()
        for adder in adders:
            assert all("closed" in error for error in adder.result(30))
    assert listed(open_memory())


def test_close_waits_for_what_is_under_way(open_memory: Any, threads: ThreadPoolExecutor) -> None:
    memory = quick(open_memory())
    waits, go_on = held_up(memory)
    add = threads.submit(lambda: memory.add("I live in Lyon.", infer=False, **ALICE))
    assert waits.wait(10)
    closing = [threads.submit(memory.close) for _ in range(2)]
    time.sleep(SOON)
    assert not any(close.done() for close in closing), "a second close returns when the first is done"
    with pytest.raises(StoreError, match="closed"):
        memory.get_all(filters=ALICE)
    go_on.set()
    for close in closing:
        close.result(30)
    row = add.result(30)["results"][0]["id"]
    assert listed(open_memory()) == [row]


def test_close_does_not_wait_for_ever(
    open_memory: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "LEAVE_S", 0.1)
    memory = quick(open_memory())
    waits, go_on = held_up(memory)
    add = threads.submit(lambda: memory.add("I live in Lyon.", infer=False, **ALICE))
    assert waits.wait(10)
    memory.close()
    go_on.set()
    with pytest.raises(StoreError, match="closed while this was under way") as caught:
        add.result(30)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert listed(open_memory()) == []


async def test_async_reset_and_close_while_tasks_add(open_memory: Any) -> None:
    memory = quick(open_memory(kind=AsyncInferScaleMemory))

    async def adding_() -> str:
        while True:
            try:
                await memory.add("I live in Lyon.", infer=False, **ALICE)
            except StoreError as error:
                return str(error)

    # More of them than asyncio has threads: they must not keep the reset from having one.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    adders = [asyncio.create_task(adding_()) for _ in range(8)]
    for _ in range(2):
        await asyncio.sleep(0.1)
        await asyncio.wait_for(memory.reset(), 60)
    await memory.aclose()
    assert all("closed" in said for said in await asyncio.wait_for(asyncio.gather(*adders), 60))
    listed(open_memory())


async def test_a_close_that_holds_up_the_loop_does_not_wait_for_it(open_memory: Any) -> None:
    memory = quick(open_memory(kind=AsyncInferScaleMemory))
    waits, go_on = held_up(memory)
    add = asyncio.create_task(memory.add("I live in Lyon.", infer=False, **ALICE))
    assert await asyncio.to_thread(waits.wait, 10)
    began = time.monotonic()
    memory.close()
    assert time.monotonic() - began < core_module.LEAVE_S / 2
    go_on.set()
    with pytest.raises(StoreError, match="closed"):
        await add


# delete_all.


def deleting_what_is_listed(memory: Any, delete: Callable[[str], Any]) -> None:
    """Has one fact deleted right after a delete_all has listed it."""
    store = memory.vector_store
    original, left = store.list, [1]

    def list_(*args: Any, **kwargs: Any) -> Any:
        page = original(*args, **kwargs)
        if left:
            left.pop()
            delete(page[0][0].id)
        return page

    store.list = list_


def turns(memory: Any) -> int:
    return int(memory._core.turns._db.execute("SELECT count(*) FROM turns").fetchone()[0])


def test_delete_all_while_one_is_deleted(memory: InferScaleMemory) -> None:
    quick(memory)
    ids = [memory.add(f"Fact {n}.", infer=False, **ALICE)["results"][0]["id"] for n in range(5)]
    deleting_what_is_listed(memory, memory.delete)
    assert turns(memory) == 5
    memory.delete_all(**ALICE)
    assert listed(memory) == [] and turns(memory) == 0
    assert all([line["event"] for line in memory.history(row)] == ["ADD", "DELETE"] for row in ids)
    with pytest.raises(ValueError, match="not found"):
        memory.delete(ids[0])


async def test_async_delete_all_while_one_is_deleted(
    async_memory: AsyncInferScaleMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory = quick(async_memory)
    for n in range(5):
        await memory.add(f"Fact {n}.", infer=False, **ALICE)
    deleting_what_is_listed(memory, lambda row: memory._raw_store.delete(vector_id=row))
    await memory.delete_all(**ALICE)
    assert (await memory.get_all(filters=ALICE))["results"] == [] and turns(memory) == 0
    assert "Failed to delete" not in caplog.text


def test_two_delete_all_at_once(memory: InferScaleMemory, threads: ThreadPoolExecutor) -> None:
    quick(memory)
    for n in range(30):
        memory.add(f"Fact {n}.", infer=False, **ALICE)
    for done in [threads.submit(memory.delete_all, **ALICE) for _ in range(2)]:
        assert done.result(60) == {"message": "Memories deleted successfully!"}
    assert listed(memory) == [] and turns(memory) == 0


# A reset that does not come to its end.


def test_after_a_reset_that_failed_the_memory_goes_on(open_memory: Callable[..., Any]) -> None:
    memory = open_memory()
    memory.add("I keep bees", **ALICE, infer=False)
    reset = memory._raw_store.reset

    def away() -> None:
        raise ConnectionError("the store is away")

    memory._raw_store.reset = away
    with pytest.raises(ConnectionError):
        memory.reset()
    memory._raw_store.reset = reset
    assert isinstance(memory.vector_store, FactStore) and isinstance(memory.db, History)
    (handle,) = (hit["memory"] for hit in memory.search("bees", filters=ALICE)["results"])
    assert memory.resolve(handle) == "I keep bees", "what is still stored is still known"
    memory.add("I keep goats", **ALICE, infer=False)
    memory.close()

    again = open_memory()
    assert sorted(fact["memory"] for fact in again.get_all(filters=ALICE)["results"]) == ["I keep bees", "I keep goats"]


def test_rows_that_a_failed_reset_has_deleted_are_gone(memory: InferScaleMemory) -> None:
    memory.add("I keep bees", **ALICE, infer=False)
    (handle,) = (hit["memory"] for hit in memory.search("bees", filters=ALICE)["results"])
    assert memory.service.wait(30)
    create = memory._raw_store.create_col

    def away(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the store is away")

    memory._raw_store.create_col = away
    with pytest.raises(ConnectionError):
        memory.reset()
    memory._raw_store.create_col = create
    memory._raw_store.create_col(384, False)
    assert memory.resolve(handle) == handle
    assert memory.service.engine.status().records <= 1, "the header's is left"


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1])
async def test_a_reset_that_is_cancelled_is_finished_first(async_memory: AsyncInferScaleMemory, after: float) -> None:
    await async_memory.add("I keep bees", **ALICE, infer=False)
    reset = asyncio.create_task(async_memory.reset())
    await asyncio.sleep(after)
    reset.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reset
    assert isinstance(async_memory.vector_store, FactStore) and isinstance(async_memory.db, History)
    await async_memory.add("I keep goats", **ALICE, infer=False)
    hits = (await async_memory.search("animals", filters=ALICE))["results"]
    texts = {await async_memory.resolve(hit["memory"]) for hit in hits}
    assert "I keep goats" in texts and len(texts) == len(hits)
    assert not async_memory._core.journal._open


async def test_a_reset_waits_for_a_write_whose_task_was_cancelled(async_memory: AsyncInferScaleMemory) -> None:
    insert, waits, go_on = async_memory._raw_store.insert, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        waits.set()
        assert go_on.wait(30)
        return insert(*args, **kwargs)

    async_memory._raw_store.insert = slow
    add = asyncio.create_task(async_memory.add("I keep bees", **ALICE, infer=False))
    assert await asyncio.to_thread(waits.wait, 30)
    add.cancel()
    with pytest.raises(asyncio.CancelledError):
        await add
    reset = asyncio.create_task(async_memory.reset())
    await asyncio.sleep(SOON)
    assert not reset.done()
    go_on.set()
    await reset
    assert (await async_memory.get_all(filters=ALICE))["results"] == []
