"""A server as users start it: ``inferscale-mem serve``, in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from inferscale_mem.testing.scene import KEY

START_SECONDS = 600
STOP_SECONDS = 60
SMALL = ("--block-size", "32", "--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", "32")
"""For tiny models."""


@dataclass(frozen=True)
class LiveServer:
    """Where it listens, and what it has written."""

    base_url: str
    log: Path


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
    return port


@contextlib.contextmanager
def live_server(
    model: str | None,
    *options: str,
    command: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[LiveServer]:
    """Start a server, wait until it answers, and stop it afterwards.

    Args:
        model: what it serves; None: the packaged one.
        options: of the command.
        command: another command than ``inferscale-mem serve MODEL``.
        environment: variables besides this process's and the handle key.
        port: where it listens; None: any that is free.
    """
    port = port or free_port()
    command = command or (*("-m", "inferscale_mem.cli.main", "serve"), *([model] if model else []))
    env = {**os.environ, "INFERSCALE_HANDLE_KEY": KEY.hex(), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with log.open("wb") as out:
            arguments = [sys.executable, *command, "--port", str(port), *options]
            process = subprocess.Popen(arguments, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)
        try:
            _wait(process, port, log)
            yield LiveServer(f"http://127.0.0.1:{port}/v1", log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-4000:])
