"""A server that is restarted between two answers: nothing wrong is said, and the records come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import tiny_models
from langchain_core.messages import HumanMessage
from live_server import SMALL, free_port, live_server
from recorder_helpers import ALICE, new_fact
from small_index import SmallIndex

from inferscale_mem import ChatInferScale
from inferscale_mem.config import EncodingConfig, EngineConfig
from inferscale_mem.engines.vllm_server import VllmServerEngine
from inferscale_mem.errors import EngineAwayError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.kv.directory import ABSENT
from inferscale_mem.service import MemoryService
from inferscale_mem.testing.scene import KEY
from inferscale_mem.types import PromptPlan, Sampling

pytestmark = pytest.mark.engine

QUESTION = "What may I not eat?"
SAMPLING = Sampling(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), hidden_size=128)


class Restarted:
    """A server, and a service that stays while the server goes and comes."""

    def __init__(self, path: str) -> None:
        self.port = free_port()
        self.path = path
        self.server = self.start()
        config = EngineConfig(base_url=f"http://127.0.0.1:{self.port}/v1", retries=0)
        self.engine = VllmServerEngine(path, config, KEY)
        self.signer = HandleSigner(KEY, "restart")
        self.index = SmallIndex(self.signer)
        self.service = MemoryService(self.engine, self.index, self.signer, EncodingConfig())
        self.chat = ChatInferScale(service=self.service, temperature=0.0, max_tokens=12)

    def start(self) -> Iterator[None]:
        options = ("--dtype", "float32", "--record-bytes", str(16 << 20), *SMALL)

        def run() -> Iterator[None]:
            with live_server(self.path, *options, port=self.port):
                yield

        server = run()
        next(server)
        return server

    def stop(self) -> None:
        next(self.server, None)

    def plain(self, handles: list[str]) -> str:
        """The answer to the same prompt as plain text, nothing injected."""
        plan = self.service.plan([{"role": "user", "content": QUESTION}], handles)
        bare = PromptPlan(tuple(replace(segment, record=None, handle=None) for segment in plan.segments))
        return "".join(chunk.text for chunk in self.engine.generate(bare, SAMPLING))


@pytest.fixture
def scene(path: str) -> Iterator[Restarted]:
    made = Restarted(path)
    yield made
    made.service.close()
    made.engine.close()
    made.stop()


def test_a_restart_between_two_answers(scene: Restarted) -> None:
    service, chat, asked = scene.service, scene.chat, [HumanMessage(QUESTION)]
    facts = [new_fact(text, ALICE) for text in ("I eat no nuts.", "My cat is Tom.", "I live in Oslo.")]
    scene.index.put(*facts)
    service.add(facts)
    assert service.wait(120)
    handles = [service.handle(fact) for fact in facts]
    before = chat.invoke(asked, memories=handles).response_metadata["inferscale"]
    assert (before["facts_injected"], before["missed"]) == (3, [])

    scene.stop()
    with pytest.raises(EngineAwayError, match="No server"):
        chat.invoke(asked, memories=handles)
    late, gone = new_fact("I drink tea.", ALICE), facts.pop()
    scene.index.put(late)
    service.add([late])
    scene.index.take(gone)
    with pytest.raises(EngineAwayError):
        service.remove([gone])
    assert not service.wait(3)

    scene.server = scene.start()
    dead, handles = handles.pop(), [service.handle(fact) for fact in facts]
    first = chat.invoke(asked, memories=[*handles, dead])
    report = first.response_metadata["inferscale"]
    reasons = {miss["handle"]: miss["reason"] for miss in report["missed"]}
    assert report["facts_requested"] == 3 and report["facts_injected"] + len(reasons) == 3
    assert reasons.pop(dead) == "unknown or no longer valid"
    # As it is right after the start: nothing was there, so the text was prefilled, and the answer is that of the text.
    assert report["facts_injected"] == 0 and reasons == dict.fromkeys(handles, ABSENT)
    assert first.content == scene.plain(handles)

    assert service.wait(120)
    handles.append(service.handle(late))
    after = chat.invoke(asked, memories=handles).response_metadata["inferscale"]
    assert (after["facts_requested"], after["facts_injected"], after["missed"]) == (3, 3, [])
    assert after["tokens_injected"] > 0
