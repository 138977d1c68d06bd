"""An engine in a process of its own ends with the process that started it, even if that one was killed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time

logger = logging.getLogger(__name__)

GRACE_S = 20.0
"""Seconds that the engine has to end in good order."""


def end_with_parent() -> None:
    """From now on, end this process when its parent is gone; nothing, if ``multiprocessing`` did not start it.

    vLLM 0.32's core goes on for ever otherwise, and keeps its memory.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), name="inferscale-orphan", daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    logger.warning("The process that started this engine is gone, so it ends.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
