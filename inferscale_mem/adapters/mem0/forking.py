"""A fork copies an open memory into the child, threads and engine not included: there it is worth nothing.

The lock on the folder is shared with the copy, and would be released by whoever closes first; so the child lets go of
its files without a word to Qdrant, and each use of the copy says what to do.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from inferscale_mem.adapters.mem0.qdrant import embedded_inside


class Forked(Protocol):
    """Something open that a child must leave to its parent. Only attributes may be touched: locks may be held."""

    def leave_to_parent(self) -> None:
        """Called in the child, right after the fork."""
        ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False


def watch(what: Forked) -> None:
    """Have this left to the parent by every process that is forked from now on, as long as it lives."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave)
        _registered = True
    _open.add(what)


def let_go(client: object) -> None:
    """Close this process's copy of the lock file of embedded Qdrant, without releasing the lock."""
    local = embedded_inside(client)
    lock = getattr(local, "_flock_file", None)
    if lock is not None:
        lock.close()


def _leave() -> None:
    for what in list(_open):
        what.leave_to_parent()
