"""How kernels for CPUs are compiled: by numba, unchecked, and kept for the next start."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# Unsigned numbers throughout: numba would test each signed index for being negative, and then nothing is vectorised.
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)
HALF_WORD = np.uint32(16)

OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

inline = numba.njit(**OPTIONS, forceinline=True)


def jit(function: Any, compiler: Any = numba.njit) -> Any:
    """``compiler(function)``, with the machine code kept between runs where there is room for it."""
    try:
        return compiler(cache=True, **OPTIONS)(function)
    except RuntimeError:  # nowhere to keep it: neither this folder nor the user's cache can be written
        return compiler(**OPTIONS)(function)
