"""Long-term memory for self-hosted LLM apps, kept as precomputed KV state inside the serving engine.

Importing this package loads neither torch nor vLLM, makes no folder and starts nothing: names load on first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale_mem.adapters.langchain import ChatInferScale as ChatInferScale
    from inferscale_mem.adapters.langchain import InferScaleRetriever as InferScaleRetriever
    from inferscale_mem.adapters.langgraph import InferScaleMemoryMiddleware as InferScaleMemoryMiddleware
    from inferscale_mem.adapters.langgraph import InferScaleStore as InferScaleStore
    from inferscale_mem.adapters.mem0 import AsyncInferScaleMemory as AsyncInferScaleMemory
    from inferscale_mem.adapters.mem0 import InferScaleMemory as InferScaleMemory
    from inferscale_mem.config import InferScaleConfig as InferScaleConfig
    from inferscale_mem.errors import InferScaleError as InferScaleError

__version__ = "0.1.0"

_WHERE = {
    "AsyncInferScaleMemory": "inferscale_mem.adapters.mem0",
    "ChatInferScale": "inferscale_mem.adapters.langchain",
    "InferScaleConfig": "inferscale_mem.config",
    "InferScaleError": "inferscale_mem.errors",
    "InferScaleMemory": "inferscale_mem.adapters.mem0",
    "InferScaleMemoryMiddleware": "inferscale_mem.adapters.langgraph",
    "InferScaleRetriever": "inferscale_mem.adapters.langchain",
    "InferScaleStore": "inferscale_mem.adapters.langgraph",
}

__all__ = [
    "AsyncInferScaleMemory",
    "ChatInferScale",
    "InferScaleConfig",
    "InferScaleError",
    "InferScaleMemory",
    "InferScaleMemoryMiddleware",
    "InferScaleRetriever",
    "InferScaleStore",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
