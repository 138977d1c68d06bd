"""LangChain: a chat model whose memories are injected as KV."""

from inferscale_mem.adapters.langchain.chat_model import ChatInferScale

__all__ = ["ChatInferScale"]
