from __future__ import annotations

import argparse
import socket

import pytest

from inferscale_mem.cli import main, serve
from inferscale_mem.errors import ConfigError, PortInUseError


def test_the_model_and_our_options_are_told_from_vllms() -> None:
    given = ["m", "--port", "1", "--record-bytes", "5", "--dtype=float32", "--no-self-test", "--record-bytes=6"]
    own, others = serve.split(given)
    assert own == ["m", "--record-bytes", "5", "--no-self-test", "--record-bytes=6"]
    assert others == ["--port", "1", "--dtype=float32"]
    assert serve.split(["--port", "1"]) == ([], ["--port", "1"])
    assert serve.split([]) == ([], [])


def test_the_last_of_an_option_counts() -> None:
    assert serve.option(["--port", "1", "--port=2"], "--port") == "2"
    assert serve.option(["--port"], "--port") is None


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


def test_the_model_comes_first() -> None:
    with pytest.raises(ConfigError, match="--model"):
        serve.run(argparse.Namespace(model=None, passed_on=["--model", "x"]))
