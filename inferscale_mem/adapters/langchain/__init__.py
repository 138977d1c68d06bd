"""LangChain: a chat model whose memories are injected as KV, and a retriever of such memories."""

from inferscale_mem.adapters.langchain.chat_model import ChatInferScale
from inferscale_mem.adapters.langchain.retriever import InferScaleRetriever

__all__ = ["ChatInferScale", "InferScaleRetriever"]
