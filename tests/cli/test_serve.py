from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import free_port

from inferscale_mem.cli import main, serve
from inferscale_mem.cli.port_lock import held_port
from inferscale_mem.engines.serve_options import check_options, option
from inferscale_mem.errors import ConfigError, ModelError, PortInUseError


def test_the_model_and_our_options_are_told_from_vllms() -> None:
    given = ["m", "--port", "1", "--record-bytes", "5", "--dtype=float32", "--no-self-test", "--record-bytes=6"]
    own, others = serve.split(given)
    assert own == ["m", "--record-bytes", "5", "--no-self-test", "--record-bytes=6"]
    assert others == ["--port", "1", "--dtype=float32"]
    assert serve.split(["--port", "1"]) == ([], ["--port", "1"])
    assert serve.split([]) == ([], [])


def test_the_last_of_an_option_counts() -> None:
    assert option(["--port", "1", "--port=2"], "--port") == "2"
    assert option(["--port"], "--port") is None
    assert option(["--api_server_count", "2", "-asc", "3"], "--api-server-count") == "3"


def test_a_port_in_use_is_named_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(PortInUseError, match=f"port {port}"):
            serve.check_port(["--port", port])
        assert main.main(["serve", "--port", port]) == 2
        assert f"port {port}" in capsys.readouterr().err
        serve.check_port(["--uds", "/tmp/x", "--port", port])
    serve.check_port(["--port", port])


@pytest.mark.parametrize("options", [["--port", "x"], ["--port", "70000"], ["--host", "256.0.0.1"]])
def test_addresses_that_are_none(options: list[str]) -> None:
    with pytest.raises(ConfigError):
        serve.check_port(options)


LOADING = """
import sys, time
from inferscale_mem.cli import main, serve
serve.resolve_model = lambda config: (print("loading", flush=True), time.sleep(600))
main.main(["serve", "--port", sys.argv[1]])
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_server_that_still_loads_has_its_port(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(config: object) -> str:
        raise ModelError("it went on to the model")

    monkeypatch.setattr(serve, "resolve_model", resolve)
    port = str(free_port())
    with subprocess.Popen([sys.executable, "-c", LOADING, port], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == "loading\n"
            assert main.main(["serve", "--port", port]) == 2
            assert f"port {port}; it may still be loading" in capsys.readouterr().err
            assert main.main(["serve", "--port", "0"]) == 1
            assert main.main(["serve", "--uds", str(home / "socket"), "--port", port]) == 1
        finally:
            first.kill()
    assert main.main(["serve", "--port", port]) == 1
    assert "went on to the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.2", True),
        ("127.0.0.1", "0.0.0.0", False),
        ("::", "127.0.0.1", False),
        ("::1", "127.0.0.1", True),
    ],
)
def test_which_addresses_share_a_port(home: Path, one: str, other: str, together: bool) -> None:
    expected = contextlib.nullcontext() if together else pytest.raises(PortInUseError)
    with held_port(home, one, 8000), held_port(home, other, 8001), expected, held_port(home, other, 8000):
        assert together
    with held_port(home, other, 8000):
        pass


def test_a_forked_process_does_not_keep_the_port(home: Path) -> None:
    reading, writing = os.pipe()
    started, starting = os.pipe()
    with held_port(home, "127.0.0.1", 8000):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.write(starting, b".")
            os.read(reading, 1)  # until the test ends
            os._exit(0)
        os.read(started, 1)
    try:
        with held_port(home, "127.0.0.1", 8000):
            pass
    finally:
        for end in (writing, reading, started, starting):
            os.close(end)
        assert os.waitpid(child, 0) == (child, 0)


def test_without_a_place_for_locks_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with held_port(tmp_path / "file", "127.0.0.1", 8000):
        assert "port 8000" in caplog.text


def test_the_model_comes_first() -> None:
    with pytest.raises(ConfigError, match="--model"):
        serve.run(argparse.Namespace(model=None, passed_on=["--model", "x"]))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--api-server-count 2", "one API server process"),
        ("--api_server_count=2", "one API server process"),
        ("-asc 2", "one API server process"),
        ("--data-parallel-size 4", "--data-parallel-size 4: Memory lives in one engine"),
        ("-dp=2", "Memory lives in one engine"),
        ("-dcp 2", "decode context parallel"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8: records cannot be made"),
        ("--kv-cache-dtype=int8_per_token_head", "quantised KV cache"),
        ('--speculative-config {"num_speculative_tokens":3}', "speculative decoding"),
        ("--speculative-config.method ngram", "speculative decoding"),
        ("-sc {}", "speculative decoding"),
        ("--spec-method ngram", "--spec-method: memory does not work"),
        ('--kv-transfer-config {"kv_connector":"LMCacheConnectorV1"}', "memory connector"),
        ("--record-bytes 0", "record_bytes=0 must be a positive"),
        ("--record-bytes=-1", "record_bytes=-1 must be a positive"),
    ],
)
def test_what_does_not_go_with_memory_is_refused_before_anything_is_loaded(
    given: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(config: object) -> str:
        raise AssertionError("it went on to the model")

    monkeypatch.setattr(serve, "resolve_model", resolve)
    assert main.main(["serve", "owner/name", "--port", "0", *given.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        "--api-server-count 1 --data-parallel-size 1 --kv-cache-dtype auto --dtype float32",
        '--kv-transfer-config {"kv_connector":"InferScaleConnector"}',
        "--kv-cache-dtype bfloat16",
    ],
)
def test_what_goes_with_memory(given: str) -> None:
    check_options(given.split())
