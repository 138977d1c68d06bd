"""Handles that expire, as an app with a memory sees them. No test waits: the memory's clock is moved."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from inferscale_mem import AsyncInferScaleMemory, ChatInferScale, InferScaleMemory
from inferscale_mem.adapters.langchain import InferScaleRetriever
from inferscale_mem.adapters.langgraph import InferScaleStore
from inferscale_mem.handles import ENDLESS, EXPIRED, find

NOW = 1_800_000_000.0
KEY = "ab" * 32
STRICT = {"handle_key": KEY, "handles": {"expire_after_s": 3600}}
ALICE = {"user_id": "alice"}
FACT = "I am allergic to peanuts."


@pytest.fixture
def memory(open_memory: Any) -> InferScaleMemory:
    opened = open_memory(inferscale=STRICT)
    pass_time(opened, 0)
    opened.add(FACT, user_id="alice", infer=False)
    assert opened.service.wait(30)
    return opened


def pass_time(memory: Any, seconds: float) -> None:
    """Let the memory's clock stand so many seconds behind NOW."""
    memory.service.signer.clock = lambda: NOW + seconds


def ask(memory: Any, *messages: Any, **kwargs: Any) -> dict[str, Any]:
    answer = ChatInferScale(memory=memory).invoke([*messages, HumanMessage("What may I not eat?")], **kwargs)
    report = answer.response_metadata["inferscale"]
    return {**report, "missed": {miss["handle"]: miss["reason"] for miss in report["missed"]}}


def test_search_hands_out_handles_that_end(memory: InferScaleMemory, engine: Any) -> None:
    hits = memory.search("food", filters=ALICE)
    handle = hits["results"][0]["memory"]
    assert handle.split(".")[2] == str(int(NOW) + 3600)
    assert memory.resolve(hits)["results"][0]["memory"] == FACT == memory.resolve(handle)
    assert ask(memory, memories=hits)["facts_injected"] == 1
    assert ask(memory, SystemMessage(f"Memories:\n- {handle}"))["facts_injected"] == 1
    pass_time(memory, 3600)
    assert memory.resolve(handle) == handle
    report = ask(memory, memories=hits)
    assert report["facts_injected"] == 0 and report["missed"] == {handle: EXPIRED}
    assert FACT not in engine.tokenizer.decode(engine.requests[-1][0].token_ids)
    fresh = memory.search("food", filters=ALICE)
    assert ask(memory, memories=fresh)["facts_injected"] == 1, "whoever searches again has it again"


async def test_the_async_memory_too(open_memory: Any) -> None:
    memory = open_memory(inferscale=STRICT, kind=AsyncInferScaleMemory)
    await memory.add(FACT, user_id="alice", infer=False)
    pass_time(memory, 0)
    handle = (await memory.search("food", filters=ALICE))["results"][0]["memory"]
    assert len(handle.split(".")) == 4 and await memory.resolve(handle) == FACT
    pass_time(memory, 3600)
    assert await memory.resolve(handle) == handle


def test_update_and_delete_kill_handles_before_their_time(memory: InferScaleMemory) -> None:
    hit = memory.search("food", filters=ALICE)["results"][0]
    memory.update(hit["id"], "I am allergic to nuts.")
    assert memory.resolve(hit["memory"]) == hit["memory"]
    new = memory.search("food", filters=ALICE)["results"][0]["memory"]
    memory.delete(hit["id"])
    assert memory.resolve(new) == new
    assert ask(memory, memories=[new])["facts_injected"] == 0
    assert memory.service.wait(30)


def test_recalled_handles_are_not_stored(memory: InferScaleMemory) -> None:
    handle = memory.search("food", filters=ALICE)["results"][0]["memory"]
    pass_time(memory, 3600)
    for given in (handle, f"- {handle}", [{"role": "user", "content": handle}]):
        assert memory.add(given, user_id="alice", infer=False)["results"] == []
    memory.add(f"My sister ({handle}) lives in Rome.", user_id="alice", infer=False)
    assert not find(str(memory.get_all(filters=ALICE)))


def test_retriever_and_store_hand_them_out(memory: InferScaleMemory) -> None:
    (document,) = InferScaleRetriever(memory=memory, user_id="alice").invoke("food")
    store = InferScaleStore(memory, namespace=("{user_id}",))
    store.put(("alice",), "tea", {"text": "I like tea."})
    (hit,) = store.search(("alice",), query="tea")
    assert memory.service.wait(30)
    report = ask(memory, SystemMessage(document.page_content), memories=[hit])
    assert (report["facts_injected"], report["missed"]) == (2, {})
    pass_time(memory, 3600)
    report = ask(memory, SystemMessage(document.page_content), memories=[hit])
    assert report["missed"] == {document.page_content: EXPIRED, hit.handle: EXPIRED}


def test_the_setting_can_be_changed_between_starts(open_memory: Any) -> None:
    """Facts stay; handles of either time are judged by the memory that is open now."""
    with open_memory(inferscale={"handle_key": KEY}) as lax:
        lax.add(FACT, user_id="alice", infer=False)
        lasting = lax.search("food", filters=ALICE)["results"][0]["memory"]
    with open_memory(inferscale=STRICT) as strict:
        pass_time(strict, 0)
        expiring = strict.search("food", filters=ALICE)["results"][0]["memory"]
        assert strict.resolve([lasting, expiring]) == [lasting, FACT]
        assert ask(strict, memories=[lasting])["missed"] == {lasting: ENDLESS}
    with open_memory(inferscale={"handle_key": KEY}) as lax:
        pass_time(lax, 0)
        assert lax.resolve([lasting, expiring]) == [FACT, FACT]
        pass_time(lax, 3600)
        assert lax.resolve([lasting, expiring]) == [FACT, expiring]
