"""Inputs from real users' bug reports (cases M1 to M9), with what must happen here."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from mem0.configs.base import MemoryConfig
from mem0_helpers import keeps, texts

from inferscale_mem import AsyncInferScaleMemory, InferScaleMemory
from inferscale_mem.errors import FactError
from inferscale_mem.kv.directory import ABSENT
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Sampling, Scope

ALICE = {"user_id": "alice"}


def ask(memory: Any, question: str, hits: Any) -> tuple[str, Any]:
    """The prompt that an app's question with these hits makes, and the report of its answer."""
    lines = "\n".join(f"- {hit['memory']}" for hit in hits["results"])
    messages = [
        {"role": "system", "content": f"You are kind. Memories:\n{lines}"},
        {"role": "user", "content": question},
    ]
    service = memory.service
    plan = service.plan(messages)
    (*_, last) = service.generate(plan, Sampling(max_tokens=8))
    return service.engine.tokenizer.decode(plan.token_ids), last.report


def test_m1_encoding_never_holds_up_add_nor_hides_a_fact(memory: InferScaleMemory, engine: FakeEngine) -> None:
    """The engine does not finish a single encode until the test is over."""
    engine.pause_encoding()
    memory.add("I'm allergic to peanuts.", infer=False, **ALICE)
    hits = memory.search("What may I not eat?", filters=ALICE)
    prompt, report = ask(memory, "What may I not eat?", hits)
    assert "- I'm allergic to peanuts." in prompt
    assert report.facts_requested == 1 and report.facts_injected == 0
    assert [(miss.handle, miss.reason) for miss in report.missed] == [(hits["results"][0]["memory"], ABSENT)]
    engine.resume_encoding()
    assert memory.service.wait(30)
    prompt, report = ask(memory, "What may I not eat?", hits)
    assert "- I'm allergic to peanuts." in prompt and report.facts_injected == 1 and report.missed == ()


@pytest.mark.parametrize("memory_format", ["handle", "text"])
def test_m2_the_readme_loop(open_memory: Any, memory_format: str) -> None:
    """Five turns of search, prompt, and adding the whole conversation: nothing recalled is stored again."""
    engine = FakeEngine(answers=keeps("peanuts", "Lyon", "cats", "violin", "night"))
    memory = open_memory(engine=engine)
    turns = [
        "I'm allergic to peanuts.",
        "I live in Lyon.",
        "I have two cats.",
        "I play the violin.",
        "I work at night.",
    ]
    for said in turns:
        hits = memory.search(said, filters=ALICE, threshold=0.0, memory_format=memory_format)
        recalled = "\n".join(f"- {hit['memory']}" for hit in hits["results"])
        asked_before = len(engine.requests)
        conversation = [
            {"role": "system", "content": f"You are a helpful AI. Memories:\n{recalled}"},
            {"role": "user", "content": said},
            {"role": "assistant", "content": "I see."},
        ]
        memory.add(conversation, **ALICE)
        prompts = [engine.tokenizer.decode(plan.token_ids) for plan, _ in engine.requests[asked_before:]]
        assert len(prompts) == 1
        assert "ism1." not in prompts[0]
        assert not [fact for fact in turns if fact != said and fact in prompts[0]]
    assert texts(memory.get_all(filters=ALICE)) == sorted(turns)
    kept = memory._core.turns.earlier(Scope(**ALICE), [], 99)
    assert [turn["role"] for turn in kept] == ["user", "assistant"] * 5
    assert not [turn for turn in kept if "ism1." in turn["content"]]


def test_m3_an_update_is_what_the_model_sees(memory: InferScaleMemory) -> None:
    fact = memory.add("My favourite player is Ronaldo.", infer=False, **ALICE)["results"][0]["id"]
    old = memory.search("favourite player", filters=ALICE)
    assert memory.service.wait(30)
    memory.update(fact, "My favourite player is Messi.")
    assert memory.service.wait(30)
    prompt, report = ask(memory, "Who is my favourite player?", old)
    assert "Ronaldo" not in prompt and "Messi" not in prompt
    assert report.facts_requested == 1 and report.facts_injected == 0 and len(report.missed) == 1
    prompt, report = ask(memory, "Who is my favourite player?", memory.search("favourite player", filters=ALICE))
    assert "Messi" in prompt and "Ronaldo" not in prompt and report.facts_injected == 1


def test_m4_eight_threads(memory: InferScaleMemory) -> None:
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for n in range(20):
                memory.add(f"Worker {worker} has seen number {n}.", infer=False, **ALICE)
                if n % 5 == 0:
                    memory.search(f"number {n}", filters=ALICE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(memory.get_all(filters=ALICE, top_k=1000)["results"]) == 160
    assert memory.service.wait(120) and memory.service.recorder.failures == {}
    directory = memory.service.engine._directory
    assert len({record.handle for record in directory._ready.values() if record.handle}) == 160


def test_m5_close_and_open_the_same_path(open_memory: Any) -> None:
    first = open_memory()
    first.add("I live in Lyon.", infer=False, **ALICE)
    first.close()
    second = open_memory()
    assert second.resolve(texts(second.search("where I live", filters=ALICE))) == ["I live in Lyon."]
    second.add("I have two cats.", infer=False, **ALICE)
    assert len(second.get_all(filters=ALICE)["results"]) == 2


def test_m5_after_a_process_that_did_not_close(open_memory: Any, home: Path) -> None:
    script = (
        "from inferscale_mem import InferScaleMemory; from inferscale_mem.testing import FakeEngine; import os; "
        "m = InferScaleMemory(engine=FakeEngine()); m.add('I live in Lyon.', user_id='alice', infer=False); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path.cwd())
    memory = open_memory()
    hits = memory.search("where I live", filters=ALICE)
    assert memory.resolve(texts(hits)) == ["I live in Lyon."]
    assert memory.service.wait(30)
    _, report = ask(memory, "Where do I live?", hits)
    assert report.facts_injected == 1


def test_m8_turns_of_the_facts_own_run(open_memory: Any) -> None:
    memory = open_memory(inferscale={"encoding": {"policy": "dialog_window(3)"}})
    long = [{"role": "user", "content": f"This is turn {n}."} for n in range(25)]
    memory.add(long, infer=False, run_id="one", **ALICE)
    memory.add("I live in Lyon.", infer=False, run_id="two", **ALICE)
    index = memory.service.index
    (in_two,) = index.facts(Scope(user_id="alice", run_id="two"))
    assert index.turns(in_two, 3) == ["user: I live in Lyon."]
    last = index.facts(Scope(user_id="alice", run_id="one"))[-1]
    assert index.turns(last, 3) == ["user: This is turn 22.", "user: This is turn 23.", "user: This is turn 24."]
    assert memory.service.wait(60) and memory.service.recorder.failures == {}
    memory.delete_all(run_id="one")
    assert index.turns(last, 3) == []


@pytest.mark.parametrize("kind", [InferScaleMemory, AsyncInferScaleMemory])
def test_m8_what_extraction_gets_to_read(open_memory: Any, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """The last ten turns of the same run; not the oldest, not another run's, not the new ones twice."""
    asked: list[str] = []

    def extract(self: Any, messages: list[dict[str, str]], **kwargs: Any) -> str:
        _, before = messages[-1]["content"].split("## Last k Messages\n")
        asked.append(before.split("## Recently")[0])
        return '{"memory": []}'

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(memory, name)(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    monkeypatch.setattr("mem0.llms.openai.OpenAILLM.generate_response", extract)
    config = {"llm": {"provider": "openai", "config": {"api_key": "none"}}}
    memory = open_memory(MemoryConfig(**config), kind=kind)
    call("add", [{"role": "user", "content": f"This is turn {n:02}."} for n in range(25)], infer=False, run_id="1")
    call("add", "I am in another run.", infer=False, run_id="2")
    call("add", "And this is new.", run_id="1")
    assert asked[-1].strip().splitlines() == [f"user: This is turn {n}." for n in range(15, 25)]
    call("add", "And this is newer.", run_id="1")
    assert asked[-1].strip().splitlines()[-1] == "user: And this is new."
    call("delete_all", run_id="1")
    call("add", "After it.", run_id="1")
    assert asked[-1].strip() == ""
    assert memory.db.connection.execute("SELECT COUNT(*) FROM messages").fetchone() == (0,)


@pytest.mark.parametrize("infer", [True, False])
@pytest.mark.parametrize("text", ["x" * 60_000, "word " * 12_000, "", " \n "])
def test_m9_facts_that_are_none(memory: InferScaleMemory, text: str, infer: bool) -> None:
    with pytest.raises(FactError, match=r"hold no text; give the text|tokens, at most \d+ are allowed; split it"):
        memory.add(text, infer=infer, **ALICE)
    assert memory.get_all(filters=ALICE)["results"] == []
    assert memory.search("anything", filters=ALICE, threshold=0.0)["results"] == []


def test_m9_only_emoji(memory: InferScaleMemory) -> None:
    memory.add("🎉🎂🥳", infer=False, **ALICE)
    hits = memory.search("🎉🎂🥳", filters=ALICE)
    assert memory.resolve(texts(hits)) == ["🎉🎂🥳"]
    assert memory.service.wait(30)
    _, report = ask(memory, "What do I celebrate?", hits)
    assert report.facts_injected == 1


def test_m4_everything_at_once() -> None:
    """A short run of tests/stress/mixed_load.py; the long one is --seconds 60."""
    program = Path(__file__).parents[2] / "stress" / "mixed_load.py"
    done = subprocess.run([sys.executable, str(program), "--seconds", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    threads, tasks = map(json.loads, done.stdout.splitlines())
    assert threads["records"] == threads["facts"] > 16 and tasks["records"] == tasks["facts"] > 100


def test_an_update_brings_no_deleted_fact_back(memory: InferScaleMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deleted while the update works out the new text's embedding."""
    fact = memory.add("I live in Lyon.", infer=False, **ALICE)["results"][0]["id"]
    read = memory.vector_store.get

    def read_then_delete(*args: Any, **kwargs: Any) -> Any:
        row = read(*args, **kwargs)
        monkeypatch.undo()
        memory.delete(fact)
        return row

    monkeypatch.setattr(memory.vector_store, "get", read_then_delete)
    with pytest.raises(ValueError, match="deleted meanwhile"):
        memory.update(fact, "I live in Oslo.")
    assert memory.get(fact) is None and memory.get_all(filters=ALICE)["results"] == []
    assert [line["event"] for line in memory.history(fact)] == ["ADD", "DELETE"]
