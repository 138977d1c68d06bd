"""Mem0 on this package: InferScaleMemory is mem0.Memory, AsyncInferScaleMemory is mem0.AsyncMemory, kept as KV.

Mem0 reports to its makers, and shows notices, unless ``MEM0_TELEMETRY=false`` is set before it is imported; importing
this adapter sets it, unless the app has set it to anything. Mem0 also makes the folder ``MEM0_DIR`` (``~/.mem0``) when
it is imported; nothing of ours lies there.
"""

from __future__ import annotations

from inferscale_mem.adapters.mem0 import telemetry

telemetry.silence()

from inferscale_mem.adapters.mem0.async_memory import AsyncInferScaleMemory  # noqa: E402  # now that it is silent
from inferscale_mem.adapters.mem0.defaults import register  # noqa: E402
from inferscale_mem.adapters.mem0.errors import ExtractionError, MessagesError, MissingOwnerError  # noqa: E402
from inferscale_mem.adapters.mem0.memory import InferScaleMemory  # noqa: E402

register()

__all__ = ["AsyncInferScaleMemory", "ExtractionError", "InferScaleMemory", "MessagesError", "MissingOwnerError"]
