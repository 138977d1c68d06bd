"""What users of the fake engine rely on in their own tests; the conformance suite covers the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from inferscale_mem.engines.requests import DROPPED
from inferscale_mem.errors import EngineClosedError, EngineError
from inferscale_mem.testing import BytesTokenizer, FakeEngine
from inferscale_mem.testing.scene import ALICE, KEY, STORE, Scene, Segment, Span
from inferscale_mem.types import EncodePlan, EncodeReport, PromptPlan, Sampling

HELLO = PromptPlan((Segment("text", tuple(b"Hello there.")),))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(key=KEY)


def say(engine: FakeEngine, plan: PromptPlan = HELLO, sampling: Sampling | None = None) -> str:
    return "".join(chunk.text for chunk in engine.generate(plan, sampling or Sampling()))


def test_importing_it_is_light() -> None:
    script = "import sys, inferscale_mem.testing; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "inferscale_mem.testing.fake_engine" in loaded
    assert not {"torch", "transformers", "vllm", "pytest", "mem0", "langchain_core"} & set(loaded)


def test_it_repeats_the_end_of_the_prompt(engine: FakeEngine) -> None:
    assert say(engine) == "You said: Hello there."


def test_scripted_answers_come_in_order_and_the_last_one_stays() -> None:
    engine = FakeEngine(["One.", "Two."])
    assert [say(engine) for _ in range(3)] == ["One.", "Two.", "Two."]
    assert say(FakeEngine("Always.")) == "Always."


def test_answers_may_depend_on_what_was_asked() -> None:
    engine = FakeEngine(lambda plan, sampling: f"{len(plan.token_ids)} tokens, stop {list(sampling.stop)}")
    assert say(engine, sampling=Sampling(stop=("x",))) == "12 tokens, stop ['"


def test_schemas_get_their_simplest_instance(engine: FakeEngine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "facts": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "kind": {"enum": ["a", "b"]},
            "sure": {"type": "boolean"},
        },
        "required": ["facts", "kind"],
    }
    assert json.loads(say(engine, sampling=Sampling(json_schema=schema))) == {"facts": [""], "kind": "a"}


def test_it_remembers_what_it_was_asked(engine: FakeEngine) -> None:
    scene = Scene(engine)
    memory = scene.memory("Likes notes.")
    scene.encode([memory])
    plan = scene.plan([memory])
    scene.ask(plan, Sampling(max_tokens=5))
    engine.drop([memory.handle])
    assert [span.record for encode in engine.encodes for span in encode.spans] == [memory.record]
    assert engine.requests == [(plan, Sampling(max_tokens=5))]
    assert engine.drops == [memory.handle]


def test_it_fails_when_told_to(engine: FakeEngine) -> None:
    scene = Scene(engine)
    engine.fail_next(EngineError("out of order"))
    engine.fail_next(EngineError("out of memory"), on="encode")
    with pytest.raises(EngineError, match="out of order"):
        say(engine)
    with pytest.raises(EngineError, match="out of memory"):
        scene.encode_header()
    assert say(engine)
    assert scene.encode_header().encoded


def test_it_evicts_when_told_to(engine: FakeEngine) -> None:
    scene = Scene(engine)
    memory = scene.memory("Likes to stay.")
    scene.encode_all([memory])
    chunks = engine.generate(scene.plan([memory]), Sampling())
    next(chunks)
    engine.evict_all()
    assert engine.status().records == 2, "records in use stay"
    assert list(chunks)[-1].report is not None
    engine.evict_all()
    assert engine.status().records == engine.status().bytes == 0
    answer = scene.ask(scene.plan([memory]))
    assert (answer.report.facts_injected, len(answer.report.missed)) == (0, 2)


def test_a_fact_dropped_while_it_is_encoded_never_comes_to_be(engine: FakeEngine) -> None:
    scene = Scene(engine)
    memory = scene.memory("Likes to leave.")
    reports: list[EncodeReport] = []
    engine.pause_encoding()
    encoder = threading.Thread(target=lambda: reports.append(scene.encode([memory])))
    encoder.start()
    while not engine.encodes:
        time.sleep(0.001)
    engine.drop([memory.handle])
    engine.resume_encoding()
    encoder.join()
    assert (reports[0].encoded, reports[0].refused) == ((), {memory.record: DROPPED})
    assert engine.status().bytes == 0
    assert scene.ask(scene.plan([memory])).report.facts_injected == 0


def test_closing_ends_an_encode_that_waits(engine: FakeEngine) -> None:
    plan = EncodePlan((Segment("text", (1, 2)),), (Span("record", 0, 2),), ALICE, STORE)
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            engine.encode(plan)
        except BaseException as error:
            errors.append(error)

    engine.pause_encoding()
    encoder = threading.Thread(target=encode)
    encoder.start()
    while not engine.encodes:
        time.sleep(0.001)
    engine.close()
    encoder.join()
    assert isinstance(errors[0], EngineClosedError)


def test_its_tokenizer_keeps_text_and_control_tokens_apart() -> None:
    tokenizer = BytesTokenizer()
    text = "a<|end|>é"
    assert tokenizer.decode(tokenizer.encode(text, literal=True)) == text
    assert tokenizer.encode(text, literal=False) == [97, 257, 195, 169]
    assert tokenizer.render([{"role": "user", "content": "Hi."}]) == "<|start|>user\nHi.<|end|>\n<|start|>assistant\n"
