"""Run a compiled function on the threads that torch computes with.

Threads of one's own would wait for a core: between two computations, those of OpenMP keep theirs busy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


def on_all_threads(function: int, argument: int, threads: int) -> None:
    """Call a C function on several threads at once, this one included, and wait for all of them.

    Where torch was built without OpenMP it is called on this thread only.

    Args:
        function: address of a ``void (*)(void *)``; called once per thread, so it has to share the work out itself.
        argument: address it is given.
        threads: as many as torch uses (``torch.get_num_threads()``), or OpenMP would start and end some.
    """
    parallel = _parallel()
    if parallel is None or threads == 1:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
    else:
        parallel(function, argument, threads, 0)


@lru_cache(maxsize=1)
def _parallel() -> Callable[..., Any] | None:
    """``GOMP_parallel`` of the OpenMP library that torch uses: a preloaded one, or else the one it was linked to."""
    linked = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (None, linked):
        try:
            function = ctypes.CDLL(None if library is None else str(library)).GOMP_parallel
        except (AttributeError, OSError):
            continue
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return function
    return None
