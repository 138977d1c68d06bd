"""What the engine over HTTP says when the other side does not fit. The other side is a few lines of ``http.server``."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import tiny_models

from inferscale_mem import ChatInferScale, engines, remote
from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.engines import open_engine, vllm_server
from inferscale_mem.engines.vllm_server import VllmServerEngine
from inferscale_mem.errors import ConfigError, EngineAwayError, EngineClosedError, EngineError, InputError, ModelError
from inferscale_mem.tokenizer import load_tokenizer
from inferscale_mem.types import Chunk, EngineInfo, PromptPlan, Sampling, Segment

KEY = bytes(range(32))
PLAN = PromptPlan((Segment("text", (1, 2, 3)),))
INFO = EngineInfo("tiny", "print", 64, 16, "float32", 100, 10_000, True, True, "vllm 0.32.0")

Reply = tuple[int, bytes]


class Fake:
    """A server whose replies a test writes; None hangs up."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer, self.key, self.engine = tokenizer, KEY, INFO
        self.replies: list[Reply | None] = []
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        self.info: Callable[[str], Reply | None] = self._info

    def _info(self, nonce: str) -> Reply:
        found = remote.ServerInfo(self.engine, 264, self.tokenizer, remote.prove(self.key, nonce))
        return 200, json.dumps(found.to_json()).encode()

    def reply(self, path: str, body: bytes, headers: dict[str, str]) -> Reply | None:
        self.asked.append((path, body, headers))
        if path.startswith("/inferscale/v1/info"):
            return self.info(parse_qs(urlsplit(path).query)["nonce"][0])
        return self.replies.pop(0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.fixture
def fake(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(vllm_server, "FIRST_WAIT", 0.001)
    fake = Fake(load_tokenizer(path).digest)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            reply = fake.reply(self.path, body, {k.lower(): v for k, v in self.headers.items()})
            if reply is None:
                return  # closes the connection
            self.send_response(reply[0])
            self.send_header("content-length", str(len(reply[1])))
            self.end_headers()
            self.wfile.write(reply[1])

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}/v1"  # type: ignore[attr-defined]
    yield fake
    server.shutdown()
    server.server_close()


def connect(fake: Any, path: str, key: bytes | None = KEY, **config: Any) -> VllmServerEngine:
    return VllmServerEngine(path, EngineConfig(base_url=fake.url, **config), key)


def lines(*said: Any) -> Reply:
    return 200, b"".join(json.dumps(line).encode() + b"\n" for line in said)


def said(text: str, reason: str | None = None, answer: Any = None) -> dict[str, Any]:
    return {"chunks": [remote.chunk_to_json(Chunk(0, text, (7,), ({7: -0.5},), reason))], "answer": answer}


END = {"chunks": [], "end": True}


def test_it_is_what_the_server_says(fake: Fake, path: str) -> None:
    engine = connect(fake, path, api_key="secret")
    assert engine.info == INFO
    assert fake.asked[0][2]["authorization"] == "Bearer secret"
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.status()


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        ((404, b"{}"), EngineError, "without the memory middleware"),
        ((401, b"{}"), ConfigError, "API key"),
        ((500, b"oh"), EngineError, "500"),
        ((200, b"<html>"), EngineError, "JSON"),
        ((200, b"{}"), EngineError, "cannot be read"),
        ((200, b'{"v": 99}'), EngineError, "version 99"),
        ((503, b"busy"), EngineError, "503"),
        (None, EngineError, "No server"),
    ],
)
def test_a_server_of_another_kind_is_named(
    fake: Fake, path: str, reply: Reply | None, error: type[Exception], words: str
) -> None:
    fake.info = lambda nonce: reply
    with pytest.raises(error, match=words):
        connect(fake, path, retries=1)


def test_what_does_not_fit_is_named(fake: Fake, path: str) -> None:
    with pytest.raises(ConfigError, match="handle key"):
        connect(fake, path, key=bytes(32))
    with pytest.raises(ConfigError, match="handle key"):
        connect(fake, path, key=None)
    connect(fake, path, key=None, connector=False).close()
    fake.tokenizer = "another"
    with pytest.raises(ModelError, match="tokenizer"):
        connect(fake, path)


def test_nobody_there(path: str) -> None:
    config = EngineConfig(base_url="http://127.0.0.1:9/v1", retries=0)
    with pytest.raises(EngineError, match="No server at"):
        open_engine(InferScaleConfig(model=path, engine=config), KEY)


def test_nobody_there_is_known_before_a_model_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(config: InferScaleConfig) -> str:
        raise AssertionError("the model was looked for first")

    monkeypatch.setattr(engines, "resolve_model", resolve)
    config = EngineConfig(base_url="http://127.0.0.1:9/v1", retries=0)
    with pytest.raises(EngineAwayError, match="No server at"):
        open_engine(InferScaleConfig(home=tmp_path, engine=config), KEY)
    with pytest.raises(EngineAwayError, match="No server at"):
        ChatInferScale(config=InferScaleConfig(home=tmp_path, engine=config)).invoke("hi")


def test_the_model_is_looked_for_once_the_server_has_answered(
    fake: Fake, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def resolve(config: InferScaleConfig) -> str:
        asked.append(len(fake.asked))
        return path

    monkeypatch.setattr(engines, "resolve_model", resolve)
    config = InferScaleConfig(home=tmp_path, engine=EngineConfig(base_url=fake.url))  # type: ignore[attr-defined]
    one, other = open_engine(config, KEY), open_engine(config, KEY)
    assert asked == [1] and one.tokenizer is other.tokenizer
    one.close()
    other.close()


def test_an_answer_in_pieces(fake: Fake, path: str) -> None:
    engine = connect(fake, path)
    fake.replies = [lines(said("a"), said("b", "stop", None), {"chunks": [], "answer": None}, END)]
    chunks = list(engine.generate(PLAN, Sampling(max_tokens=5, stop=("x",))))
    assert [chunk.text for chunk in chunks] == ["a", "b"]
    assert chunks[0].logprobs == ({7: -0.5},) and chunks[0].token_ids == (7,)
    assert chunks[0].report is None and chunks[1].report is not None
    assert chunks[1].report.tokens_cached is None, "an older server does not say"
    tokens, sampling, params, room = remote.request_from_json(json.loads(fake.asked[-1][1]))
    assert (tokens, sampling, params, room) == ([1, 2, 3], Sampling(max_tokens=5, stop=("x",)), {}, 5)
    engine.close()


def test_how_much_was_cached_is_what_the_server_says(fake: Fake, path: str) -> None:
    engine = connect(fake, path)
    fake.replies = [lines({**said("a"), "cached": 2}, {**said("b", "stop"), "cached": 2}, END)]
    *_, last = engine.generate(PLAN, Sampling(max_tokens=5))
    assert last.report is not None and last.report.tokens_cached == 2
    engine.close()


def test_what_did_not_get_through_is_sent_again(fake: Fake, path: str) -> None:
    engine = connect(fake, path, retries=3)
    fake.replies = [None, (503, b"busy"), None, lines(said("a", "stop"), END)]
    assert [chunk.text for chunk in engine.generate(PLAN, Sampling(max_tokens=5))] == ["a"]
    fake.replies = [None, None, None, None, lines(said("a", "stop"), END)]
    with pytest.raises(EngineError, match="No server"):
        list(engine.generate(PLAN, Sampling(max_tokens=5)))
    engine.close()


def test_an_answer_that_breaks_off_is_an_error(fake: Fake, path: str) -> None:
    engine = connect(fake, path)
    fake.replies = [lines(said("a"), said("b", "stop"))]
    with pytest.raises(EngineError, match="broke off"):
        list(engine.generate(PLAN, Sampling(max_tokens=5)))
    engine.close()


def test_errors_keep_their_kind(fake: Fake, path: str) -> None:
    engine = connect(fake, path)
    fake.replies = [(400, json.dumps(remote.error_to_json(InputError("no such grammar"))).encode())]
    with pytest.raises(InputError, match="no such grammar"):
        list(engine.generate(PLAN, Sampling(max_tokens=5)))
    fake.replies = [lines(said("a"), remote.error_to_json(EngineError("it died")))]
    with pytest.raises(EngineError, match="it died"):
        list(engine.generate(PLAN, Sampling(max_tokens=5)))
    assert isinstance(remote.error_from_json({"error": {"kind": "SystemExit", "message": "x"}}), type(None))
    assert remote.error_from_json({"error": "Unauthorized"}) is None
    engine.close()


def test_a_slow_server_is_not_waited_for_forever(fake: Fake, path: str) -> None:
    engine = connect(fake, path)
    release = threading.Event()
    fake.info = lambda nonce: release.wait(30) and None
    with pytest.raises(EngineError, match=r"did not answer within 0\.2 s"):
        connect(fake, path, timeout=0.2)
    release.set()
    engine.close()


def test_facts_are_announced_signed(fake: Fake, path: str) -> None:
    from inferscale_mem.types import Fact, Scope

    engine = connect(fake, path)
    said = remote.Announcement("store", "print", 1, {"h": Fact("1", "é\n", Scope(user_id="a"), "2")})
    fake.replies = [(200, b'{"missing": ["h"], "gone": ["g"], "moment": 7}')]
    assert engine.announce(said) == remote.Announced(("h",), ("g",), 7)
    _, body, headers = fake.asked[-1]
    assert remote.is_signed_body(body, headers[remote.SIGNATURE], KEY)
    assert not remote.is_signed_body(body, headers[remote.SIGNATURE], bytes(32))
    assert not remote.is_signed_body(body + b" ", headers[remote.SIGNATURE], KEY)
    assert remote.Announcement.from_bytes(body) == said
    fake.replies = [(200, b'{"missing": ["h"]}')]
    with pytest.raises(EngineError, match="cannot be read"):
        engine.announce(said)
    engine.close()


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"store": "s", "fingerprint": "f", "text_tail": 0, "facts": [1]}']
)
def test_announcements_that_cannot_be_read(body: bytes) -> None:
    with pytest.raises(InputError):
        remote.Announcement.from_bytes(body)


UNDECODABLE: list[tuple[str, Any]] = [
    *(("stop", stop) for stop in (["a", ["b"]], [1], "a", [""], ["\ud800"])),
    *(
        (name, value)
        for name in ("seed", "max_tokens", "min_tokens", "n", "logprobs", "top_k")
        for value in ("a", 1.5, True)
    ),
    *((name, 10**30) for name in ("seed", "max_tokens", "min_tokens", "n", "logprobs", "top_k")),
    *((name, value) for name in ("ignore_eos", "skip_special_tokens", "detokenize") for value in (0, "x", None)),
    *(("temperature", value) for value in ("hot", True, math.inf, math.nan)),
    *(("json_schema", schema) for schema in ([], "x", {"a": 10**30}, {"\ud800": 1})),
]
"""What engines cannot decode; vLLM's core dies of some of it."""

UNREADABLE: list[dict[str, Any]] = [
    *({"tokens": tokens} for tokens in ([], [-1], [True], "x")),
    *({"sampling": {name: value}} for name, value in UNDECODABLE),
    *({"params": {"x": value}} for value in ("\ud800", 10**30, json.loads("[" * 300 + "]" * 300))),
    *(
        {"room": "1"},
        {"room": 0},
        {"params": []},
        {"sampling": 1},
        {"sampling": {"nonsense": 1}},
        {"sampling": {"stop": 3}},
    ),
]


@pytest.mark.parametrize("change", UNREADABLE)
def test_requests_that_cannot_be_read(change: dict[str, Any]) -> None:
    good = remote.request_to_json([1], Sampling(), {}, 1)
    assert remote.request_from_json(good) == ([1], Sampling(), {}, 1)
    with pytest.raises(InputError):
        remote.request_from_json({**good, **change})


def test_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig(base_url="http://host:1/v1").kind == "server"
    wrong_urls = ({"base_url": url} for url in ("host:1", "http://", "http:///v1", "ftp://h"))
    for wrong in ({"kind": "server"}, {"base_url": "http://h", "kind": "transformers"}, *wrong_urls):
        with pytest.raises(ConfigError):
            EngineConfig(**wrong)
    for wrong in (
        {"timeout": 0},
        *({"retries": times} for times in (-1, True)),
        *({"timeout": seconds} for seconds in ("1", float("nan"), True)),
        *({"api_key": key} for key in (3, "secret\n", "ключ")),
    ):
        with pytest.raises(ConfigError):
            EngineConfig(base_url="http://h", **wrong)
    monkeypatch.setenv("INFERSCALE_BASE_URL", "http://there:8000/v1")
    monkeypatch.setenv("INFERSCALE_API_KEY", "secret")
    engine = InferScaleConfig.from_env().engine
    assert (engine.kind, engine.base_url, engine.api_key) == ("server", "http://there:8000/v1", "secret")
    assert "secret" not in repr(engine)
    given = InferScaleConfig.from_env({"engine": {"base_url": "http://here/v1"}}).engine
    assert given == replace(engine, base_url="http://here/v1")
