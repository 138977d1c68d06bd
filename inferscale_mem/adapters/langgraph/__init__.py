"""LangGraph and LangChain agents: a middleware that recalls, and a store whose hits can be injected."""

from inferscale_mem.errors import MissingDependencyError

try:
    from inferscale_mem.adapters.langgraph.middleware import InferScaleMemoryMiddleware
    from inferscale_mem.adapters.langgraph.store import InferScaleStore
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in ("langchain", "langgraph"):
        raise
    raise MissingDependencyError(str(error.name), "langgraph") from error

__all__ = ["InferScaleMemoryMiddleware", "InferScaleStore"]
