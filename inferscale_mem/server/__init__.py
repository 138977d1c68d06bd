"""What runs inside vLLM's server process: ``--middleware inferscale_mem.server.MemoryMiddleware``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale_mem.server.middleware import MemoryMiddleware as MemoryMiddleware

__all__ = ["MemoryMiddleware"]


def __getattr__(name: str) -> Any:
    if name != "MemoryMiddleware":  # loaded when vLLM asks for it: it loads vLLM
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("inferscale_mem.server.middleware").MemoryMiddleware
