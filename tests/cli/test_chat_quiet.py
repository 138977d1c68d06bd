"""What is kept out of the conversation, and what is not."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from inferscale_mem.cli.chat.quiet import Quiet, own_stream

SHOUT = "import sys; print('child out', flush=True); print('child err', file=sys.stderr, flush=True)"


def test_other_peoples_noise_goes_to_the_log_and_ours_to_the_person(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "deep" / "chat.log"
    person = own_stream(sys.stdout, 1)
    with Quiet(log) as quiet:
        with quiet.starting():
            subprocess.run([sys.executable, "-c", SHOUT], check=True)
            print("library out")
            person.write("still starting\n")
            person.flush()
        warnings.warn("library warning", stacklevel=1)
        logging.getLogger("inferscale_mem.somewhere").warning("our warning")
        print("our error", file=sys.stderr)
        print("our out")
    captured = capfd.readouterr()
    assert captured.out == "still starting\nour out\n"
    assert captured.err == "our warning\nour error\n"
    written = log.read_text()
    assert "child out" in written and "child err" in written and "library out" in written
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"
