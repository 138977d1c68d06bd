"""What runs inside vLLM's server process: ``--middleware inferscale_mem.server.MemoryMiddleware``."""

from inferscale_mem.server.middleware import MemoryMiddleware as MemoryMiddleware

__all__ = ["MemoryMiddleware"]
