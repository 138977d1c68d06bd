"""A live server with the packaged model, and what people do with it: memories through any OpenAI client."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from live_server import LiveServer, free_port
from openai import OpenAI

from inferscale_mem import ChatInferScale, InferScaleMemory, wire
from inferscale_mem.handles import ALPHABET, ENDLESS, EXPIRED
from inferscale_mem.testing.scene import KEY
from inferscale_mem.types import PromptPlan, Sampling, Scope, Segment

pytestmark = pytest.mark.engine

FACTS = ["My dog is called Biscuit.", "I am allergic to walnuts.", "I work as a nurse in Oslo."]
QUESTIONS = {"What is the name of my dog?": "Biscuit", "What am I allergic to?": "walnut"}


@pytest.fixture
def memory(server: LiveServer, warm_home: Any) -> Iterator[InferScaleMemory]:
    settings = {"home": str(warm_home), "handle_key": KEY.hex(), "engine": {"base_url": server.base_url}}
    with InferScaleMemory(inferscale=settings) as memory:
        yield memory


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def tell(memory: InferScaleMemory, user: str = "alice") -> None:
    for fact in FACTS:
        memory.add(fact, user_id=user, infer=False)
    assert memory.service.wait(120)


def prompt(memory: InferScaleMemory, question: str, user: str = "alice") -> list[dict[str, str]]:
    """Mem0's README loop, up to the call of the model."""
    found = memory.search(query=question, filters={"user_id": user}, top_k=3, threshold=0.0)
    memories = "\n".join(f"- {entry['memory']}" for entry in found["results"])
    return ask_with(memories, question)


def ask_with(memories: str, question: str) -> list[dict[str, str]]:
    # The last sentence is for the small model: without it, it says, memories as plain text or not, that it has none.
    system = (
        "You are a helpful AI. Answer the question based on query and memories.\n"
        f"User Memories:\n{memories}\nAnswer in one short sentence, using these memories."
    )
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def create(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model, messages=messages, **{"temperature": 0, "max_tokens": 32, **options}
    )


def test_the_loop_with_an_ordinary_client(memory: InferScaleMemory, client: OpenAI) -> None:
    tell(memory)
    for question, word in QUESTIONS.items():
        answer = create(client, prompt(memory, question))
        assert word in answer.choices[0].message.content
        report = answer.model_extra["inferscale"]
        assert (report["facts_requested"], report["facts_injected"], report["missed"]) == (3, 3, [])
        assert answer.usage.prompt_tokens_details.cached_tokens == report["tokens_injected"] > 30
        assert report["tokens_injected"] + report["tokens_prefilled"] == answer.usage.prompt_tokens


def test_the_same_as_a_stream(memory: InferScaleMemory, client: OpenAI) -> None:
    tell(memory)
    for question, word in QUESTIONS.items():
        messages = prompt(memory, question)
        whole = create(client, messages).choices[0].message.content
        chunks = list(create(client, messages, stream=True, stream_options={"include_usage": True}))
        assert len(chunks) > 3
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole and word in text
        usage = [chunk for chunk in chunks if chunk.usage is not None]
        assert len(usage) == 1
        report = usage[0].model_extra["inferscale"]
        assert report["facts_injected"] == 3 and report["ttft_ms"] > 0
        assert usage[0].usage.prompt_tokens_details.cached_tokens == report["tokens_injected"]


def test_answers_that_a_stop_string_ends_are_reported(memory: InferScaleMemory, client: OpenAI) -> None:
    tell(memory)
    messages = prompt(memory, "What is the name of my dog?")
    whole = create(client, messages).choices[0].message.content
    stop = whole[len(whole) // 2 :][:4]
    answer = create(client, messages, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra["inferscale"]["facts_injected"] == 3
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(client, messages, stop=["e"], n=2, temperature=0.5, **options))
    assert {c.choices[0].finish_reason for c in chunks if c.choices} == {None, "stop"}
    assert chunks[-1].model_extra["inferscale"]["facts_injected"] == 3
    chat = ChatInferScale(memory=memory, temperature=0.0, max_tokens=24)
    hits = memory.search("What is the name of my dog?", filters={"user_id": "alice"}, top_k=3, threshold=0.0)
    stopped = chat.invoke([HumanMessage("What is the name of my dog?")], memories=hits, stop=["e"])
    assert stopped.response_metadata["inferscale"]["facts_injected"] == 3


def test_beam_search_knows_the_facts_and_says_that_none_was_injected(memory: InferScaleMemory, client: OpenAI) -> None:
    tell(memory)
    messages = prompt(memory, "What is the name of my dog?")
    answer = create(client, messages, n=2, extra_body={"use_beam_search": True})
    report = answer.model_extra["inferscale"]
    assert "Biscuit" in answer.choices[0].message.content
    assert report["facts_injected"] == 0 and len(report["missed"]) == 3
    assert all("beam search" in miss["reason"] for miss in report["missed"])


def test_a_stream_without_usage_has_no_chunk_more(memory: InferScaleMemory, client: OpenAI) -> None:
    tell(memory)
    chunks = list(create(client, prompt(memory, "What am I allergic to?"), stream=True))
    assert all(chunk.choices for chunk in chunks)


def test_the_chat_model_on_the_same_server(memory: InferScaleMemory) -> None:
    tell(memory)
    chat = ChatInferScale(memory=memory, temperature=0.0, max_tokens=24)
    hits = memory.search("What is the name of my dog?", filters={"user_id": "alice"}, top_k=3, threshold=0.0)
    answer = chat.invoke([HumanMessage("What is the name of my dog?")], memories=hits)
    assert answer.response_metadata["inferscale"]["facts_injected"] == 3
    chunks = list(chat.stream([HumanMessage("What is the name of my dog?")], memories=hits))
    assert len(chunks) > 2
    reports = [c.response_metadata["inferscale"] for c in chunks if "inferscale" in c.response_metadata]
    assert [report["facts_injected"] for report in reports] == [3]


def forged(handle: str) -> str:
    last = ALPHABET[(ALPHABET.index(handle[-1]) + 1) % len(ALPHABET)]
    return handle[:-1] + last


def test_forged_foreign_and_stale_handles_stay_text_and_are_counted(memory: InferScaleMemory, client: OpenAI) -> None:
    tell(memory)
    other = memory.add("My cat is called Pepper.", user_id="bob", infer=False)
    assert memory.service.wait(120)
    good = [hit["memory"] for hit in memory.search("dog", filters={"user_id": "alice"}, top_k=3)["results"]]
    foreign = memory.search("cat", filters={"user_id": "bob"})["results"][0]["memory"]
    memory.delete(other["results"][0]["id"])
    bad = [forged(good[0]), foreign, "ism1.0123456789abcdef.0123456789abcdef"]
    messages = ask_with("\n".join(f"- {handle}" for handle in [*good, *bad]), "What is the name of my dog?")
    with client.with_streaming_response.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, temperature=0, max_tokens=24
    ) as response:
        headers, answer = response.headers, response.parse()
    report = answer.model_extra["inferscale"]
    assert report["facts_injected"] == len(good)
    assert {miss["handle"] for miss in report["missed"]} == set(bad)
    assert headers["x-inferscale-facts-requested"] == str(len(good) + 3)
    assert headers["x-inferscale-handles-refused"] == "3"
    assert "Pepper" not in answer.choices[0].message.content
    # Alone, they are what any text is to vLLM.
    alone = create(client, ask_with(bad[0], "What is the name of my dog?"))
    assert alone.model_extra["inferscale"]["facts_injected"] == 0
    assert alone.usage.prompt_tokens > 60  # the handle's own characters are in it
    both = create(client, ask_with(good[0], "?"), extra_body={"inferscale": {"scope": {"user_id": "bob"}}})
    assert both.model_extra["inferscale"]["missed"][0]["reason"] == "belongs to another owner"


def test_a_strict_memorys_handles_end_on_the_server_too(server: LiveServer, tmp_path: Path, client: OpenAI) -> None:
    """The server has the key only: that handles must expire is told to it with the facts."""
    strict = {"home": str(tmp_path), "handle_key": KEY.hex(), "engine": {"base_url": server.base_url}}
    with InferScaleMemory(inferscale={**strict, "handles": {"expire_after_s": 600}}) as memory:
        memory.add("My cat is called Pepper.", user_id="fay", infer=False)
        assert memory.service.wait(120)
        (hit,) = memory.search("cat", filters={"user_id": "fay"})["results"]
        good = hit["memory"]
        (fact,) = memory.service.resolve([good]).facts.values()
        signer = memory.service.signer
        lasting = signer.mint(fact)
        signer.clock = lambda: time.time() - 601
        ended = signer.issue(fact)
        chat = ChatInferScale(memory=memory, temperature=0.0, max_tokens=2)
        here = chat.invoke([HumanMessage("?")], memories=[good]).response_metadata["inferscale"]
    assert (here["facts_injected"], here["missed"]) == (1, [])
    question = "What is the name of my cat?"
    answer = create(client, ask_with(good, question))
    report = answer.model_extra["inferscale"]
    assert (report["facts_requested"], report["facts_injected"], report["missed"]) == (1, 1, [])
    assert "Pepper" in answer.choices[0].message.content
    stream = create(client, ask_with(good, question), stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "ism1" not in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].model_extra["inferscale"]["facts_injected"] == 1
    answer = create(client, ask_with("\n".join(f"- {handle}" for handle in (ended, lasting, good)), question))
    report = answer.model_extra["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (3, 1)
    assert {miss["handle"]: miss["reason"] for miss in report["missed"]} == {ended: EXPIRED, lasting: ENDLESS}
    for refused in (ended, lasting):
        answer = create(client, ask_with(refused, question))
        assert answer.model_extra["inferscale"]["facts_injected"] == 0
        assert "Pepper" not in answer.choices[0].message.content


def test_right_after_add_a_fact_is_there(memory: InferScaleMemory, client: OpenAI) -> None:
    memory.add(FACTS[0], user_id="carol", infer=False)
    answer = create(client, prompt(memory, "What is the name of my dog?", "carol"))
    report = answer.model_extra["inferscale"]
    assert report["facts_requested"] == 1
    assert report["facts_injected"] + len(report["missed"]) == 1
    assert "Biscuit" in answer.choices[0].message.content


def test_an_update_kills_the_old_handle(memory: InferScaleMemory, client: OpenAI) -> None:
    added = memory.add("My favourite player is Ronaldo.", user_id="dan", infer=False)
    assert memory.service.wait(120)
    old = prompt(memory, "Who is my favourite player?", "dan")
    assert create(client, old).model_extra["inferscale"]["facts_injected"] == 1
    memory.update(added["results"][0]["id"], "My favourite player is Messi.")
    assert memory.service.wait(120)
    stale = create(client, old)
    assert stale.model_extra["inferscale"]["facts_injected"] == 0
    assert "Ronaldo" not in stale.choices[0].message.content
    assert "Messi" in create(client, prompt(memory, "Who is my favourite player?", "dan")).choices[0].message.content


def test_what_the_server_lost_is_encoded_again_after_a_search(memory: InferScaleMemory, client: OpenAI) -> None:
    """As after a restart of the server, or when others' records have pushed these out."""
    tell(memory, "erin")
    handles = [hit["memory"] for hit in memory.search("dog", filters={"user_id": "erin"})["results"]]
    memory.service.engine.drop(handles)
    assert memory.service.engine.status().records >= 0
    assert create(client, ask_with(handles[0], "?")).model_extra["inferscale"]["facts_injected"] == 0
    prompt(memory, "What is the name of my dog?", "erin")
    assert memory.service.wait(120)
    answer = create(client, prompt(memory, "What is the name of my dog?", "erin"))
    assert answer.model_extra["inferscale"]["facts_injected"] == 3


def test_requests_without_memories_are_vllms_own(client: OpenAI) -> None:
    answer = create(client, [{"role": "user", "content": "Say hello."}])
    assert "inferscale" not in (answer.model_extra or {})
    with pytest.raises(Exception, match="message"):
        create(client, [])


# Strangers.


def _post(server: LiveServer, body: Any, path: str = "/chat/completions") -> httpx.Response:
    return httpx.post(server.base_url + path, json=body, timeout=120)


def test_raw_parameters_of_strangers_do_nothing(memory: InferScaleMemory, server: LiveServer, client: OpenAI) -> None:
    tell(memory)
    engine = memory.service.engine
    found = memory.search("dog", filters={"user_id": "alice"}, top_k=3)["results"]
    handles = [hit["memory"] for hit in found]
    held = engine.status()
    model = client.models.list().data[0].id
    text = Segment("text", tuple(engine.tokenizer.encode("Nothing to see here, move along.", literal=True)))
    record = memory.service.planner.record_id(handles[0])
    stolen = PromptPlan((memory.service.planner.fact_segment(memory.resolve(handles[0]), handles[0]), text))
    for order in (
        wire.drop_params(handles),
        wire.inject_params(PromptPlan(stolen.segments, Scope(user_id="alice"), memory.service.signer.store)),
        {wire.KEY: {"v": 1, "op": "encode", "spans": [{"record": record, "start": 0, "end": 3}]}},
        wire.status_params(),
    ):
        body = {"model": model, "prompt": stolen.token_ids, "max_tokens": 1, "kv_transfer_params": order}
        answer = _post(server, body, "/completions").json()
        assert answer["kv_transfer_params"][wire.KEY]["error"] == wire.UNSIGNED
    assert engine.status().records == held.records
    assert create(client, prompt(memory, "What am I allergic to?")).model_extra["inferscale"]["facts_injected"] == 3


def test_no_body_stops_the_server(server: LiveServer, client: OpenAI) -> None:
    rng = random.Random(0)
    model = client.models.list().data[0].id
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    odd: list[Any] = [None, True, 0, -1, 1 << 62, 0.5, "", "x", [], {}, nested, {"v": 1}, {"op": "drop"}, ["ism1.a"]]
    system = {"role": "system", "content": "- ism1.0123456789abcdef.0123456789abcdef"}
    for _ in range(60):
        order = {
            name: rng.choice(odd) for name in rng.sample(["v", "op", "spans", "segments", "signature", "scope"], 3)
        }
        params = rng.choice([{wire.KEY: order}, {wire.KEY: rng.choice(odd)}, rng.choice(odd)])
        if isinstance(params, dict) and rng.random() < 0.4:
            params = {
                **params,
                rng.choice(["prompt_token_ids", "do_remote_prefill", "do_remote_decode"]): rng.choice(odd),
            }
        body = {
            "model": model,
            "max_tokens": 1,
            "messages": rng.choice(
                [[system, {"role": "user", "content": "Hi."}], [system], [{"content": [None]}], odd]
            ),
            "kv_transfer_params": params,
            "inferscale": rng.choice(odd),
        }
        if rng.random() < 0.3:
            body["vllm_xargs"] = {"kv_transfer_params": rng.choice(["boom", 3, ["a"]])}
        assert _post(server, body).status_code in (200, 400, 500)
    for body in (b"", b"{", b'"ism1."', b'{"messages": "ism1."}', b'{"inferscale": 1}', b"\xff ism1. \xff"):
        assert httpx.post(server.base_url + "/chat/completions", content=body, timeout=60).status_code < 600
    for path, body in (("requests", b"[]"), ("requests", b"{"), ("facts", b"{}"), ("nothing", b"")):
        url = server.base_url.removesuffix("/v1") + f"/inferscale/v1/{path}"
        assert httpx.post(url, content=body, timeout=60).status_code in (400, 403, 404)
    assert create(client, [{"role": "user", "content": "Still there?"}]).choices[0].message.content


def test_who_hangs_up_frees_the_engine(memory: InferScaleMemory, server: LiveServer) -> None:
    engine = memory.service.engine
    plan = PromptPlan((Segment("text", tuple(engine.tokenizer.encode("Count to a thousand: 1, 2,", literal=True))),))
    chunks = iter(engine.generate(plan, Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True)))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while _running(server) > 0:
        assert time.monotonic() < deadline, "the request goes on though nobody listens"
        time.sleep(0.2)


def _running(server: LiveServer) -> float:
    text = httpx.get(server.base_url.removesuffix("/v1") + "/metrics", timeout=60).text
    values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert values, json.dumps(text[:500])
    return sum(values)


# Where memories are not injected.

OTHERS = {
    "/completions": lambda text: {"prompt": text, "max_tokens": 4},
    "/responses": lambda text: {"input": text, "max_output_tokens": 4},
    "/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
}


@pytest.mark.parametrize("route", OTHERS)
def test_other_routes_refuse_handles_instead_of_ignoring_them(
    memory: InferScaleMemory, server: LiveServer, client: OpenAI, route: str
) -> None:
    tell(memory)
    good = memory.search("dog", filters={"user_id": "alice"}, top_k=1)["results"][0]["memory"]
    model = client.models.list().data[0].id
    refused = _post(server, {"model": model, **OTHERS[route](f"Memory: {good}. What is my dog called?")}, route)
    assert refused.status_code == 400 and "/v1/chat/completions" in refused.json()["error"]["message"]
    assert "Biscuit" not in refused.text
    # What only looks like one is text, and counted.
    passed = _post(server, {"model": model, **OTHERS[route](f"A log: {forged(good)}.")}, route)
    assert passed.status_code == 200 and passed.headers["x-inferscale-handles-refused"] == "1"
    assert "Biscuit" not in passed.text
    plain = _post(server, {"model": model, **OTHERS[route]("Hello.")}, route)
    assert plain.status_code == 200 and "x-inferscale-handles-refused" not in plain.headers


def test_what_was_deleted_while_the_server_was_away_is_dropped_when_it_is_reached_again(
    server: LiveServer, client: OpenAI, warm_home: Any
) -> None:
    def opened(base_url: str) -> InferScaleMemory:
        engine = {"base_url": base_url, "retries": 0}
        return InferScaleMemory(inferscale={"home": str(warm_home), "handle_key": KEY.hex(), "engine": engine})

    with opened(server.base_url) as memory:
        tell(memory, "frank")
        hit = memory.search("dog", filters={"user_id": "frank"}, top_k=1)["results"][0]
        handle = hit["memory"]
    with opened(f"http://127.0.0.1:{free_port()}/v1") as memory:  # nobody listens there
        memory.delete(hit["id"])
        left = memory.get_all(filters={"user_id": "frank"})["results"]
        assert len(left) == 2 and not any("Biscuit" in entry["memory"] for entry in left)
    with opened(server.base_url) as memory:
        assert memory.service.wait(120)
        answer = create(client, ask_with(handle, "What is the name of my dog?"))
        report = answer.model_extra["inferscale"]
        assert report["facts_injected"] == 0 and report["missed"][0]["reason"] == "unknown or no longer valid"
        assert "Biscuit" not in answer.choices[0].message.content
        answer = create(client, prompt(memory, "What am I allergic to?", "frank"))
        assert answer.model_extra["inferscale"]["facts_injected"] == 2


def test_a_chat_model_without_a_memory_says_that_it_has_none(
    memory: InferScaleMemory, server: LiveServer, smollm2_path: str
) -> None:
    tell(memory)
    hits = memory.search("dog", filters={"user_id": "alice"}, top_k=1)
    chat = ChatInferScale(
        base_url=server.base_url, model=smollm2_path, config={"handle_key": KEY.hex()}, temperature=0.0, max_tokens=8
    )
    report = chat.invoke("What is my dog called?", memories=hits).response_metadata["inferscale"]
    assert (report["facts_requested"], report["facts_injected"]) == (1, 0)
    assert "ChatInferScale(memory=" in report["missed"][0]["reason"]
