"""When what failed is tried again: each time twice as late."""

from __future__ import annotations

import math
import time


def delay_s(first_s: float, failures: int, longest_s: float = math.inf) -> float:
    """Seconds to wait after so many failures in a row.

    Args:
        first_s: after the first.
        failures: 1 or more; 0 counts as 1.
        longest_s: never more than this.
    """
    return min(longest_s, first_s * 2.0 ** min(max(failures - 1, 0), 16))


class Retry:
    """Something that is tried until it works. Not thread-safe: whoever has it holds a lock.

    Attributes:
        failures: in a row, until now.
        at: the time, as ``time.monotonic``, from which it may be tried again.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self.failures = 0
        self.at = 0.0

    def failed(self) -> None:
        """Once more."""
        self.failures += 1
        self.at = time.monotonic() + delay_s(self._first_s, self.failures, self._longest_s)

    def worked(self) -> None:
        """It may be tried at any time."""
        self.failures, self.at = 0, 0.0
