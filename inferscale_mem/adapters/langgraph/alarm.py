"""A timer that goes off at the earliest of the times it was set to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

LONGEST_S = 86_400.0
"""A wait that is longer is cut: it rings too early, and is set again."""


class Alarm:
    """Rings in a thread of its own. Thread-safe.

    Args:
        ring: a method; it is not called any more when its object is gone, and the alarm does not keep that alive. It
            may be called before the time, and sets the alarm again if it still has to wait.
    """

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = WeakMethod(ring)
        self._lock = threading.Lock()
        self._at: float | None = None
        self._timer: threading.Timer | None = None

    def set(self, at: float) -> None:
        """Ring at this time (Unix seconds), unless it rings before that anyway."""
        with self._lock:
            if self._at is not None and self._at <= at:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._at = at
            wait = min(max(0.0, at - time.time()), LONGEST_S)
            self._timer = threading.Timer(wait, _go_off, [self._ring, self._over, at])
            self._timer.daemon = True
            self._timer.start()

    def _over(self, at: float) -> None:
        with self._lock:
            if self._at == at:
                self._at = self._timer = None


def _go_off(ring: WeakMethod[Callable[[], object]], over: Callable[[float], None], at: float) -> None:
    over(at)
    call = ring()
    if call is not None:
        call()
