"""A retriever over a memory: documents whose text is a handle, so that what is retrieved is injected."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, model_validator

from inferscale_mem.errors import ConfigError, ScopeError
from inferscale_mem.types import OWNER_FIELDS, Scope


class InferScaleRetriever(BaseRetriever):
    """Searches a memory.

    With ``memory_format="handle"`` (the default) a document's text is a handle: put the documents into a system
    message, as RAG chains do, and ask ``ChatInferScale``. With "text" it is the memory itself. ``k`` can be given per
    call; metadata hold ``id``, ``score`` and the memory's own.
    """

    memory: Any = Field(exclude=True, repr=False)
    """An InferScaleMemory, or an AsyncInferScaleMemory for ``ainvoke`` only."""
    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None
    filters: dict[str, Any] = Field(default_factory=dict)
    """Further filters, as Mem0's search takes them."""
    k: int = 5
    threshold: float = 0.0
    """Least similarity."""
    memory_format: Literal["handle", "text"] = "handle"

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not callable(getattr(self.memory, "search", None)):
            raise ConfigError(f"memory={self.memory!r} is no memory; give an InferScaleMemory.")
        try:
            Scope.of(self._filters)
        except ScopeError as error:  # a ValueError, which pydantic would wrap
            raise ConfigError(str(error)) from error
        return self

    @property
    def _filters(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in OWNER_FIELDS}
        return {**self.filters, **{name: value for name, value in own.items() if value is not None}}

    def _search(self, query: str, k: int | None) -> Any:
        return self.memory.search(
            query,
            filters=self._filters,
            top_k=self.k if k is None else k,
            threshold=self.threshold,
            memory_format=self.memory_format,
        )

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        if inspect.iscoroutinefunction(self.memory.search):
            raise ConfigError("This memory is asynchronous; use ainvoke, or give an InferScaleMemory.")
        return _documents(self._search(query, k))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        if inspect.iscoroutinefunction(self.memory.search):
            return _documents(await self._search(query, k))
        return _documents(await asyncio.to_thread(self._search, query, k))


def _documents(found: dict[str, Any]) -> list[Document]:
    return [
        Document(
            page_content=hit["memory"],
            id=str(hit["id"]),
            metadata={**(hit.get("metadata") or {}), "id": str(hit["id"]), "score": hit.get("score")},
        )
        for hit in found["results"]
    ]
