"""Chat requests through the middleware, with an app of the test's own behind it in place of vLLM's."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from recorder_helpers import forged
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from inferscale_mem.handles import HandleSigner
from inferscale_mem.remote import Announcement
from inferscale_mem.server import middleware
from inferscale_mem.server.bodies import FIELD
from inferscale_mem.testing.scene import KEY
from inferscale_mem.tokenizer import HFChatTokenizer, load_tokenizer
from inferscale_mem.types import Fact, Scope

SIGNER = HandleSigner(KEY, "store")
TEA, CATS = (Fact(name, f"Likes {name}.", Scope(user_id="alice"), "1") for name in ("tea", "cats"))
BOBS = Fact("rain", "Likes rain.", Scope(user_id="bob"), "1")
H, C, B = (SIGNER.mint(fact) for fact in (TEA, CATS, BOBS))
SYSTEM = {"role": "system", "content": f"Be kind.\nMemories:\n- {H}"}
ASKED = {"role": "user", "content": "What do I like?"}


class Asked:
    """An answer, and what came through to vLLM."""

    def __init__(self, sent: list[Any], seen: list[bytes], tokenizer: HFChatTokenizer) -> None:
        self.status: int = sent[0]["status"]
        self.headers = dict(sent[0]["headers"])
        self.said = json.loads(sent[1]["body"])
        self.report = self.said.get(FIELD) or {}
        self.raw = seen[0] if seen else None
        self.request = json.loads(seen[0]) if seen else None
        ids = ((self.request or {}).get("kv_transfer_params") or {}).get("prompt_token_ids") or []
        self.prompt = tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def rest(self) -> str:
        """What came through besides the order."""
        assert self.request is not None
        return json.dumps({name: value for name, value in self.request.items() if name != "kv_transfer_params"})

    @property
    def missed(self) -> dict[str, str]:
        return {miss["handle"]: miss["reason"] for miss in self.report["missed"]}


class Server:
    def __init__(self, tokenizer: HFChatTokenizer) -> None:
        self.tokenizer = tokenizer

    async def ask(self, body: bytes | None = None, **request: Any) -> Asked:
        info = SimpleNamespace(record_bytes=1 << 20, bytes_per_token=64)
        engine: Any = SimpleNamespace(
            key=KEY, admits=lambda given: True, info=info, tokenizer=self.tokenizer, template_kwargs={}
        )
        seen: list[bytes] = []
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((await receive())["body"])
            start = {"status": 200, "headers": [(b"content-type", b"application/json")]}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", "body": b"{}"})

        async def receive() -> dict[str, Any]:
            full = {"model": "m", "messages": [SYSTEM, ASKED], **request}
            return {"type": "http.request", "body": json.dumps(full).encode() if body is None else body}

        async def send(message: Any) -> None:
            sent.append(message)

        server = middleware._Server(engine, app)
        facts = {SIGNER.mint(fact): fact for fact in (TEA, CATS, BOBS)}
        server._facts.announce(Announcement("store", "0" * 16, 0, facts))
        path = {"type": "http", "method": "POST", "path": middleware.CHAT, "headers": []}
        await server.handle(path, receive, send)
        return Asked(sent, seen, self.tokenizer)


@pytest.fixture(scope="module")
def server(smollm2_path: str) -> Server:
    return Server(load_tokenizer(smollm2_path))


async def test_what_is_planned_is_in_token_ids_and_nowhere_else(server: Server) -> None:
    got = await server.ask(stop=["\n"], tools=None)
    assert "Be kind.\nMemories:\n- Likes tea.\n" in got.prompt and "ism1." not in got.prompt
    assert got.request is not None and "ism1." not in got.rest
    assert got.request["stop"] == ["\n"] and got.headers[b"x-inferscale-facts-requested"] == b"1"
    read = ChatCompletionRequest.model_validate(got.request)
    assert read.kv_transfer_params and read.kv_transfer_params["prompt_token_ids"]


async def test_requests_without_memories_pass_byte_for_byte(server: Server) -> None:
    body = json.dumps({"messages": [ASKED], "chat_template_kwargs": {"chat_template": "{{ messages }}"}}).encode(
        "utf-16"
    )
    got = await server.ask(body)
    assert got.raw == body and b"x-inferscale-facts-requested" not in got.headers


LOOP = "{% for i in range(250) %}{% for j in range(20000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "tokenize", "messages", "conversation", "tools", "return_dict", "return_tensors"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
    ],
)
@pytest.mark.parametrize("messages", [[SYSTEM, ASKED], [ASKED]])
async def test_what_makes_prompts_is_not_the_clients(server: Server, name: str, messages: list[Any]) -> None:
    got = await server.ask(messages=messages, inferscale={}, chat_template_kwargs={name: LOOP})
    assert got.status == 400 and got.request is None and name in got.said["error"]["message"]
    assert (await server.ask(messages=messages, inferscale={}, chat_template_kwargs={name: None})).status == 400


async def test_variables_that_the_template_does_not_have_change_nothing(server: Server) -> None:
    plain = await server.ask()
    other = {"enable_thinking": True, "bos": "x", "add_generation_prompt": False, "continue_final_message": True}
    assert (await server.ask(chat_template_kwargs=other)).prompt == plain.prompt != ""


async def test_the_templates_variables_are_those_vllm_sets(server: Server, smollm2_path: str) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    tokenizer.hf.chat_template = (
        "{{ mood }}|{{ reasoning_effort }}|{{ enable_thinking }}\n"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    thinking = Server(tokenizer)
    got = await thinking.ask(chat_template_kwargs={"mood": f"gay {H}"}, reasoning_effort="none")
    assert got.prompt.startswith("gay|none|False\n") and "Likes tea" in got.prompt
    got = await thinking.ask(chat_template_kwargs={"mood": C, "enable_thinking": 1}, reasoning_effort="low")
    assert got.prompt.startswith("|low|1\n") and got.missed.keys() >= {C}


@pytest.mark.parametrize(
    "options",
    [
        *({"chat_template": "x"}, {"echo": True}, {"echo": "yes"}, {"documents": [{"title": "x"}]}),
        *({"add_generation_prompt": 0}, {"add_generation_prompt": False}, {"add_special_tokens": True}),
        *({"continue_final_message": "on", "add_generation_prompt": False}, {"truncate_prompt_tokens": 5}),
        {"chat_template_kwargs": {"documents": [{"title": "x"}]}},
    ],
)
async def test_options_that_make_another_prompt(server: Server, options: dict[str, Any]) -> None:
    got = await server.ask(**options)
    assert (got.status, got.prompt) == (200, "") and "ism1." not in got.rest
    assert got.missed.keys() == {H} and "combined with" in got.missed[H]


MEDIA = [
    {"type": "text", "text": "x", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "text", "text": "x", f"{C} image_url": {"url": "x"}},
    {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "input_audio", "input_audio": {}},
    {"type": f"{H}", "text": "x"},
    {"type": None, "text": "x"},
    {"video_url": {"url": "x"}},
]


@pytest.mark.parametrize("part", MEDIA)
async def test_no_handle_is_left_where_vllm_makes_the_prompt(server: Server, part: dict[str, Any]) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": f"And {C}?"}, part]}
    got = await server.ask(messages=[SYSTEM, user])
    assert "ism1." not in got.rest
    if got.prompt:  # then vLLM takes it
        read = ChatCompletionRequest.model_validate(got.request)
        assert read.kv_transfer_params and "prompt_token_ids" in read.kv_transfer_params
    else:
        assert got.missed.keys() >= {H, C}


def calls(said: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", "tool_calls": said}


DEEP: Any = json.loads("[" * 900 + "]" * 900)
ARGUMENTS = '{"x": ' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(
    "odd",
    [
        *({"tools": tools} for tools in (5, [1], [1, 2], {"a": 1}, "abc", [[["a"]]], [{"type": "function"}])),
        {"tools": [1], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        *({"messages": [SYSTEM, calls(said), ASKED]} for said in (5, "abc", [5], [{"function": 5}], {"a": 1})),
        {
            "messages": [
                SYSTEM,
                calls([{"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]),
            ]
        },
        {"messages": [SYSTEM, {**ASKED, "foo": DEEP}]},
        *({"messages": [SYSTEM, {"role": "user", "content": said}]} for said in (5, [5], [None], {"a": 1})),
        *({"messages": [SYSTEM, {"role": role, "content": "x"}]} for role in (5, None, ["system"])),
        {"chat_template_kwargs": [1]},
        {"x": DEEP},
    ],
    ids=lambda odd: str(odd)[:60],
)
async def test_malformed_requests_get_an_error_from_us_or_from_vllm(server: Server, odd: dict[str, Any]) -> None:
    got = await server.ask(**odd)
    assert got.prompt == ""
    if got.status == 400:
        assert got.request is None and len(got.said["error"]["message"]) > 20
    else:  # handed on for vLLM's own words
        with pytest.raises(ValueError):
            ChatCompletionRequest.model_validate(got.request)
        assert got.missed.keys() == {H}


async def test_stray_fields_of_messages_reach_no_template(server: Server) -> None:
    for message in ({**ASKED, "tool_calls": "abc"}, {**ASKED, "tool_calls": [5], "foo": {"bar": [1]}}):
        got = await server.ask(messages=[SYSTEM, message])
        assert "Likes tea" in got.prompt


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": f"Looks for {C}, {B} and {forged(C)}",
        "parameters": {"type": "object", "properties": {"id": {"type": "string", "description": f"{C} {H}"}}},
    },
}


async def test_handles_in_tools_are_cut_out_or_inert_and_counted(server: Server) -> None:
    got = await server.ask(tools=[TOOL], tool_choice="auto")
    assert '"name": "look"' in got.prompt and C not in got.prompt and H not in got.prompt
    assert C not in got.rest and H not in got.rest
    assert B in got.prompt and forged(C) in got.prompt, "others' are text"
    assert got.missed.keys() == {H, C, B, forged(C)} and "tool" in got.missed[C]  # H: no engine injected it here
    alone = await server.ask(messages=[ASKED], tools=[TOOL], tool_choice="auto")
    assert alone.missed.keys() >= {C, B, H, forged(C)}


async def test_genuine_handles_elsewhere_are_cut_out(server: Server) -> None:
    user = {"role": "user", "content": f"About {C} and {B}?"}
    got = await server.ask(messages=[SYSTEM, user])
    assert C not in got.prompt and B in got.prompt and C not in got.rest
    assert got.missed.keys() >= {C, B} and "message of the user" in got.missed[C]
    alone = await server.ask(messages=[{"role": "user", "content": f"About {C}?"}])
    assert alone.prompt == "" and "ism1." not in alone.rest and alone.missed.keys() == {C}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("escaped", [False, True])
async def test_handles_are_seen_in_every_spelling_of_json(server: Server, encoding: str, escaped: bool) -> None:
    text = json.dumps({"model": "m", "messages": [SYSTEM, ASKED]})
    got = await server.ask((text.replace("ism1.", "\\u0069sm1\\u002e") if escaped else text).encode(encoding))
    assert "Likes tea" in got.prompt and got.headers[b"x-inferscale-facts-requested"] == b"1"


@pytest.mark.parametrize("given", [True, 1, "yes"])
async def test_beam_search_computes_the_facts_as_text_and_says_so(server: Server, given: Any) -> None:
    got = await server.ask(use_beam_search=given, n=2)
    assert "Likes tea" in got.prompt and "ism1." not in got.rest
    assert got.request is not None and got.request["kv_transfer_params"].keys() == {"prompt_token_ids"}
    assert "beam search" in got.missed[H] and got.report["facts_injected"] == 0


@pytest.mark.parametrize("memories", [[C], {"results": [{"memory": C, "id": "1"}]}, [{"memory": C}]])
async def test_memories_beside_the_messages(server: Server, memories: Any) -> None:
    got = await server.ask(messages=[ASKED], inferscale={"memories": memories, "scope": {"user_id": "alice"}})
    assert "Likes cats" in got.prompt and got.headers[b"x-inferscale-facts-requested"] == b"1"


@pytest.mark.parametrize(
    "said", ["alice", [], {"memory": []}, {"memories": C}, {"memories": ["Likes tea."]}, {"scope": "alice"}]
)
@pytest.mark.parametrize("messages", [[SYSTEM, ASKED], [ASKED]])
async def test_what_is_asked_in_no_readable_form_is_refused(server: Server, said: Any, messages: list[Any]) -> None:
    got = await server.ask(messages=messages, inferscale=said)
    assert got.status == 400 and got.request is None and FIELD in got.said["error"]["message"]


async def test_a_scope_that_names_nobody_is_refused(server: Server) -> None:
    got = await server.ask(inferscale={"scope": {}})
    assert got.status == 400 and got.request is None and "user_id" in got.said["error"]["message"]
