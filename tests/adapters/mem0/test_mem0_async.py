"""AsyncInferScaleMemory: the same behaviour, and an event loop that is never held up."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import mem0
import pytest
from mem0.exceptions import ValidationError as Mem0ValidationError
from mem0.memory.storage import SQLiteManager
from mem0.utils.factory import VectorStoreFactory
from mem0_helpers import keeps, texts
from qdrant_client import QdrantClient

from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.adapters.mem0.errors import ExtractionError
from inferscale_mem.errors import FactError, InputError, ScopeError, StoreError
from inferscale_mem.testing import FakeEngine

ALICE = {"user_id": "alice"}


async def add(memory: AsyncInferScaleMemory, text: str, **kwargs: Any) -> str:
    result = await memory.add(text, infer=False, **{**ALICE, **kwargs})
    return str(result["results"][0]["id"])


async def handles(memory: AsyncInferScaleMemory, query: str = "anything") -> list[str]:
    return texts(await memory.search(query, filters=ALICE, threshold=0.0))


async def test_the_whole_life_of_a_fact(async_memory: AsyncInferScaleMemory) -> None:
    memory = async_memory
    assert isinstance(memory, mem0.AsyncMemory)
    fact = await add(memory, "My favourite player is Ronaldo.")
    (old,) = await handles(memory)
    assert await memory.resolve(old) == "My favourite player is Ronaldo."
    await memory.update(fact, "My favourite player is Messi.")
    (new,) = await handles(memory)
    assert await memory.resolve([old, new]) == [old, "My favourite player is Messi."]
    assert (await memory.get(fact))["memory"] == "My favourite player is Messi."
    assert texts(await memory.get_all(filters=ALICE)) == ["My favourite player is Messi."]
    assert texts(await memory.search("player", filters=ALICE, memory_format="text")) == [
        "My favourite player is Messi."
    ]
    assert [change["event"] for change in await memory.history(fact)] == ["ADD", "UPDATE"]
    service = await memory.aservice()
    assert await asyncio.to_thread(service.wait, 30)
    assert {record.handle for record in service.engine._directory._ready.values()} >= {new}
    await memory.delete(fact)
    assert await handles(memory) == [] and await memory.resolve(new) == new
    assert new in service.engine.drops


async def test_delete_all_and_reset(async_memory: AsyncInferScaleMemory) -> None:
    memory = async_memory
    await add(memory, "I live in Lyon.")
    await add(memory, "I live in Oslo.", user_id="bob")
    await memory.delete_all(**ALICE)
    assert await handles(memory) == []
    bobs = texts(await memory.search("where", filters={"user_id": "bob"}, threshold=0.0))
    assert await memory.resolve(bobs) == ["I live in Oslo."]
    await memory.reset()
    assert await memory.resolve(bobs) == bobs
    await add(memory, "I live in Rome.")
    assert await memory.resolve(await handles(memory)) == ["I live in Rome."]
    assert len(memory.service.index.facts()) == 1, "the index follows the store that Mem0 has made anew"


async def test_extraction(open_memory: Any, tmp_path: Path) -> None:
    memory = open_memory(kind=AsyncInferScaleMemory, engine=FakeEngine(answers=keeps("tea", "Rex")))
    added = await memory.add("Hello! I like tea. My dog is called Rex.", **ALICE)
    assert texts(added) == ["I like tea.", "My dog is called Rex."]
    unsure = open_memory(kind=AsyncInferScaleMemory, engine=FakeEngine(answers="Well, "), inferscale={"home": tmp_path})
    with pytest.raises(ExtractionError):
        await unsure.add("I like tea.", **ALICE)


async def test_bad_input(async_memory: AsyncInferScaleMemory) -> None:
    memory = async_memory
    for text in ("", "  ", "broken \ud83d", "word " * 12_000):
        with pytest.raises(FactError):
            await add(memory, text)
    with pytest.raises(Mem0ValidationError):
        await memory.add("I live in Lyon.", infer=False)
    for call in (
        lambda: add(memory, "x", user_id="*"),
        lambda: memory.search("x"),
        lambda: memory.search("x", filters={"user_id": "*"}),
        lambda: memory.get_all(filters={"user_id": "*"}),
        lambda: memory.delete_all(user_id="*"),
        lambda: memory.delete_all(),
    ):
        with pytest.raises(ScopeError):
            await call()
    with pytest.raises(InputError):
        await memory.search("x", filters=ALICE, memory_format="json")
    assert texts(await memory.get_all(filters=ALICE)) == []


async def test_other_owners_are_left_out(async_memory: AsyncInferScaleMemory) -> None:
    await add(async_memory, "I have a blue car.", user_id="bob")
    leaky = {**ALICE, "AND": [{"user_id": "bob"}]}
    assert (await async_memory.search("car", filters=leaky))["results"] == []


async def test_many_at_once(async_memory: AsyncInferScaleMemory) -> None:
    memory = async_memory
    await asyncio.gather(*(add(memory, f"Fact number {n}.") for n in range(40)), *(handles(memory) for _ in range(20)))
    assert len((await memory.get_all(filters=ALICE, top_k=100))["results"]) == 40
    service = await memory.aservice()
    assert await asyncio.to_thread(service.wait, 60)
    assert service.recorder.failures == {}


async def test_close(open_memory: Any) -> None:
    async with open_memory(kind=AsyncInferScaleMemory) as memory:
        await add(memory, "I live in Lyon.")
    await memory.aclose()
    with pytest.raises(StoreError, match="closed"):
        await memory.search("x", filters=ALICE)
    again = open_memory(kind=InferScaleMemory)
    assert texts(again.get_all(filters=ALICE)) == ["I live in Lyon."]


async def test_from_config(engine: FakeEngine) -> None:
    async with AsyncInferScaleMemory.from_config({"custom_instructions": "x"}, engine=engine) as memory:
        assert isinstance(memory, AsyncInferScaleMemory) and memory.custom_instructions == "x"


async def test_the_loop_runs_while_others_wait(open_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine, embedder, Qdrant and SQLite each wait for a beat of the event loop: held up by them, it never comes."""
    loop = asyncio.get_running_loop()
    waited: Counter[str] = Counter()

    def slow_down(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if loop.is_closed():  # the test is over
                return original(*args, **kwargs)
            beat = threading.Event()
            loop.call_soon_threadsafe(beat.set)
            assert beat.wait(20), f"{name} holds up the event loop"
            waited[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(mem0.memory.main, "extract_entities", lambda text: [("name", "Lyon")])
    monkeypatch.setattr(mem0.memory.main, "extract_entities_batch", lambda all_: [[("name", "Lyon")] for _ in all_])
    engine = FakeEngine(answers=keeps("Lyon", "Oslo"))
    memory = await asyncio.to_thread(lambda: open_memory(kind=AsyncInferScaleMemory, engine=engine))
    for name in ("prepare_add", "prepare_update", "prepare_search", "present", "resolve", "forget_turns", "changed"):
        slow_down(memory._core, name)
    for name in ("encode", "drop", "generate"):
        slow_down(engine, name)
    slow_down(memory.embedding_model, "embed_batch")
    store = [name for name in vars(QdrantClient) if name in ("upsert", "query_points", "scroll", "retrieve", "delete")]
    for name in (*store, "create_collection", "delete_collection", "close"):
        slow_down(QdrantClient, name)
    slow_down(VectorStoreFactory, "create")
    for name in ("__init__", "add_history", "batch_add_history", "get_history", "get_last_messages", "save_messages"):
        slow_down(SQLiteManager, name)
    fact = await add(memory, "I live in Lyon.")
    await memory.add("I live in Lyon. I was in Oslo.", **ALICE)
    assert len(await handles(memory, "Lyon")) == 2
    await memory.resolve("text")
    await memory.update(fact, "I live in Oslo.")
    await memory.get(fact)
    await memory.get_all(filters=ALICE)
    await memory.history(fact)
    await memory.delete(fact)
    await memory.delete_all(**ALICE)
    await memory.reset()
    await add(memory, "I live in Rome.")
    assert await asyncio.to_thread(memory.service.wait, 60)
    await memory.aclose()
    expected = {"prepare_add", "changed", "encode", "drop", "generate", "embed_batch", "upsert", "create_collection"}
    assert expected | {"__init__", "create", "add_history", "batch_add_history", "close"} <= set(waited)
    engine.close()


async def test_reset_while_others_use_the_memory(async_memory: AsyncInferScaleMemory) -> None:
    """Nothing hangs; what was added after it is there."""
    memory = async_memory
    others = [asyncio.create_task(add(memory, f"Fact number {n}.")) for n in range(8)]
    await asyncio.gather(*others)
    await memory.reset()
    await add(memory, "I live in Rome.")
    assert texts(await memory.get_all(filters=ALICE)) == ["I live in Rome."]
