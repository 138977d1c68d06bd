"""Mem0's reports to its makers, and its notices: off unless the app has asked for them."""

from __future__ import annotations

import os
import sys

VARIABLE = "MEM0_TELEMETRY"


def silence() -> None:
    """Turn them off, unless the environment says otherwise. Mem0 reads it once, when it is imported.

    If Mem0 was imported before, its flags are turned off where they lie.
    """
    if VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = "false"
    for name in ("mem0.memory.telemetry", "mem0.memory.main"):
        if name in sys.modules:
            setattr(sys.modules[name], VARIABLE, False)
