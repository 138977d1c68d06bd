"""Who serves on a port, from the moment it was asked to: a server that still loads its model does not listen yet.

Until it listens, others may bind the same port. So each server holds locks on files in the home folder as long as it
lives; the system lets go of them, however the process ends. The files stay, and are empty.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from inferscale_mem.errors import PortInUseError
from inferscale_mem.private_files import make_private_folder

logger = logging.getLogger(__name__)

_held: set[int] = set()
"""File descriptors; a forked process would go on holding the locks through its copies."""
_registered = False


@contextlib.contextmanager
def held_port(home: Path, address: str, port: int) -> Iterator[None]:
    """Hold a port while the block runs. Where no file can be locked, the log says so.

    Args:
        home: folder of the files; servers with another one are not seen.
        address: numeric; one that stands for all, as 0.0.0.0, goes together with no other on this port.
        port: 0 stands for any that is free, and is not held.

    Raises:
        PortInUseError: another server of this home holds it.
    """
    _leave_to_parent()
    with contextlib.ExitStack() as stack:
        try:
            if port:
                make_private_folder(home)
                everywhere = ipaddress.ip_address(address.partition("%")[0]).is_unspecified
                stack.enter_context(_locked(home / f"serve-{port}.lock", shared=not everywhere))
                if not everywhere:
                    stack.enter_context(_locked(home / f"serve-{port}-{address}.lock", shared=False))
        except BlockingIOError as error:
            raise PortInUseError(
                f"Another inferscale-mem serve holds {address}, port {port}; it may still be loading its model. Stop "
                "it, or choose another port with --port."
            ) from error
        except OSError as error:
            logger.warning("Cannot see whether another server starts on port %d: %s", port, error)
        yield


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool) -> Iterator[None]:
    import fcntl  # not on Windows, where there is no vLLM either

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _held.add(descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _leave_to_parent() -> None:
    """From now on, processes that are forked do not hold what this one does."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_let_go)
        _registered = True


def _let_go() -> None:
    while _held:
        os.close(_held.pop())
