"""AsyncInferScaleMemory: mem0.AsyncMemory whose search gives handles, and whose facts are kept as KV records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from mem0 import AsyncMemory
from mem0.memory.main import _UNSET

from inferscale_mem.adapters.mem0 import inputs
from inferscale_mem.adapters.mem0.adapter import Adapter, emptying, is_emptying, search_scope
from inferscale_mem.adapters.mem0.core import check_format, within
from inferscale_mem.adapters.mem0.gate import to_the_end
from inferscale_mem.service import MemoryService


class _Later:
    """A store that is made when one of its methods is called, by whoever calls it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(self._make(), name)(*args, **kwargs)


class AsyncInferScaleMemory(Adapter, AsyncMemory):  # type: ignore[misc]  # Mem0 ships no types
    """A drop-in for ``mem0.AsyncMemory``: see ``InferScaleMemory``; each method raises what its twin there does.

    Whatever may block (engine, embedder, vector store, SQLite) runs in threads, not on the event loop.
    """

    async def aservice(self) -> MemoryService:
        """``service`` without blocking the event loop while the engine starts."""
        return await asyncio.to_thread(lambda: self.service)

    @property
    def entity_store(self) -> Any:
        """Mem0's store of entities. Mem0 asks for it on the event loop, and calls it in threads: made by the first."""
        parent = super()
        return parent.entity_store if self._entity_store is not None else _Later(lambda: parent.entity_store)  # type: ignore[attr-defined]

    async def add(
        self,
        messages: Any,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        timestamp: Any | None = None,
        expiration_date: Any | None = None,
        infer: bool = True,
        memory_type: str | None = None,
        prompt: str | None = None,
        llm: Any = None,
    ) -> dict[str, Any]:
        """As Mem0's. Handles in the messages are recalled memories: they are left out, not stored again."""
        async with self._open_core() as core:
            if core is not None:
                owners = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
                messages = await asyncio.to_thread(core.prepare_add, messages, owners, metadata, infer)
                if not messages:
                    return {"results": []}
            result: dict[str, Any] = await super().add(
                messages,
                user_id=user_id,
                agent_id=agent_id,
                run_id=run_id,
                metadata=metadata,
                timestamp=timestamp,
                expiration_date=expiration_date,
                infer=infer,
                memory_type=memory_type,
                prompt=prompt,
                llm=llm,
            )
            return result

    async def search(
        self,
        query: str,
        *,
        top_k: int = 20,
        filters: dict[str, Any] | None = None,
        threshold: float = 0.1,
        rerank: bool = False,
        explain: bool = False,
        reference_date: Any | None = None,
        show_expired: bool = False,
        memory_format: str = "handle",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As Mem0's, with a handle in place of each memory's text; ``memory_format="text"`` gives the text."""
        check_format(memory_format)
        async with self._open_core() as core:
            scope = search_scope(filters, kwargs) if core is not None else None
            if core is not None and scope is not None and isinstance(query, str):
                await asyncio.to_thread(core.prepare_search, query, scope, memory_format)
            found: dict[str, Any] = await super().search(
                query,
                top_k=top_k,
                filters=filters,
                threshold=threshold,
                rerank=rerank,
                explain=explain,
                reference_date=reference_date,
                show_expired=show_expired,
                **kwargs,
            )
            if core is None or scope is None:
                return found
            return await asyncio.to_thread(core.present, found, scope, memory_format)

    async def resolve(self, what: Any, *, filters: dict[str, Any] | None = None) -> Any:
        """What handles stand for, for people: see ``InferScaleMemory.resolve``."""
        async with self._open_core() as core:
            scope = inputs.owner_scope(filters, "in filters") if filters is not None else None
            return what if core is None else await asyncio.to_thread(core.resolve, what, scope)

    async def get(self, memory_id: str) -> dict[str, Any] | None:
        """As Mem0's."""
        async with self._open_core():
            item: dict[str, Any] | None = await super().get(self._row_id(memory_id))
            return item

    async def get_all(
        self,
        *,
        filters: dict[str, Any] | None = None,
        top_k: int = 20,
        show_expired: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As Mem0's; nothing outside the owner that the filters name is listed."""
        async with self._open_core() as core:
            scope = search_scope(filters, kwargs) if core is not None else None
            listed: dict[str, Any] = await super().get_all(
                filters=filters, top_k=top_k, show_expired=show_expired, **kwargs
            )
            return listed if scope is None else {**listed, "results": within(scope, listed["results"])}

    async def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = _UNSET,
        data: str | None = None,
    ) -> dict[str, Any]:
        """As Mem0's: a new revision, with a new handle; the old handle is worth nothing from then on."""
        async with self._open_core() as core:
            memory_id = self._row_id(memory_id)
            if core is not None:
                text, data, metadata = await asyncio.to_thread(core.prepare_update, memory_id, text, data, metadata)
            result: dict[str, Any] = await super().update(memory_id, text, metadata, expiration_date, data)
            return result

    async def delete(self, memory_id: str) -> dict[str, Any]:
        """As Mem0's; the fact's record goes with it."""
        async with self._open_core():
            result: dict[str, Any] = await super().delete(self._row_id(memory_id))
            return result

    async def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """As Mem0's, for one owner: wildcards are refused."""
        async with self._open_core() as core:
            owners = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
            scope = (
                inputs.owner_scope(owners, "to delete_all; reset() deletes everything") if core is not None else None
            )
            with emptying() if core is not None else contextlib.nullcontext():
                result: dict[str, Any] = await super().delete_all(**owners)
            if core is not None:
                await asyncio.to_thread(core.forget_turns, scope)
            return result

    async def history(self, memory_id: str) -> list[dict[str, Any]]:
        """As Mem0's."""
        async with self._open_core():
            changes: list[dict[str, Any]] = await super().history(self._row_id(memory_id))
            return changes

    async def reset(self) -> None:
        """As Mem0's; all records go too. Raises as the sync one; cancelled, it is finished before it ends."""
        async with self._open_core(alone=True):
            # Mem0 opens store and history again on its event loop: let it have one of its own.
            parent = super().reset
            await to_the_end(asyncio.to_thread(self._reset, lambda: asyncio.run(parent())))

    def close(self) -> None:
        """Release the engine (unless it was given), the store's lock and the history; blocks until that is done."""
        self._close()

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aexit__(self, exc_type: object, exc_val: object, exc_tb: object) -> bool:
        await self.aclose()
        return False

    async def _delete_memory(
        self, memory_id: str, existing_memory: Any = None, skip_entity_cleanup: bool = False
    ) -> str:
        if existing_memory is None and is_emptying():
            existing_memory = await asyncio.to_thread(self.vector_store.get, vector_id=memory_id)
            if existing_memory is None:  # another one was faster
                return memory_id
        deleted: str = await super()._delete_memory(memory_id, existing_memory, skip_entity_cleanup)
        return deleted

    async def _add_to_vector_store(
        self,
        messages: list[dict[str, Any]],
        metadata: dict[str, Any],
        effective_filters: dict[str, Any],
        infer: bool,
        prompt: str | None = None,
    ) -> list[dict[str, Any]]:
        with self._extracting(messages, effective_filters, infer, prompt):
            stored: list[dict[str, Any]] = await super()._add_to_vector_store(
                messages, metadata, effective_filters, infer, prompt
            )
            return stored
