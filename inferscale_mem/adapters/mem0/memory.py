"""InferScaleMemory: mem0.Memory whose search gives handles, and whose facts are kept as KV records."""

from __future__ import annotations

import contextlib
from typing import Any

from mem0 import Memory
from mem0.memory.main import _UNSET

from inferscale_mem.adapters.mem0 import inputs
from inferscale_mem.adapters.mem0.adapter import Adapter, emptying, is_emptying, search_scope
from inferscale_mem.adapters.mem0.core import check_format, within


class InferScaleMemory(Adapter, Memory):  # type: ignore[misc]  # Mem0 ships no types
    """A drop-in for ``mem0.Memory``.

    Without arguments everything is local: the engine answers and extracts, embedder and Qdrant run in this process,
    facts lie in ``home``. ``search`` gives handles; ``get``, ``get_all`` and ``history`` give text. Encoding runs in
    the background: a fact without a record yet is served as text.

    The engine starts with the first ``search`` for handles (which does not wait for it), or with the first ``add``,
    ``update`` of a text, or ``service`` (which do: whatever is wrong with the model shows before anything is stored). A
    memory that only searches for text, lists, resolves or deletes never starts it. See ``Adapter`` for the arguments.
    """

    def add(
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
    ) -> dict[str, Any]:
        """As Mem0's. Handles in the messages are recalled memories: they are left out, not stored again.

        Raises:
            MissingOwnerError, ScopeError: no owner, or not one.
            MessagesError, FactError, InputError: what was given cannot be stored.
            ExtractionError: the extraction LLM failed or cannot be read.
            ModelError, EngineError, ...: the engine cannot be opened. Nothing is stored in any of these cases.
        """
        with self._open_core() as core:
            if core is not None:
                owners = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
                messages = core.prepare_add(messages, owners, metadata, infer)
                if not messages:
                    return {"results": []}
            result: dict[str, Any] = super().add(
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
            )
            return result

    def search(
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
        """As Mem0's, with a handle in place of each memory's text; ``memory_format="text"`` gives the text.

        Handles go into a system message, or to the chat model's ``memories=``; ``resolve`` shows what they stand for.

        Raises:
            MissingOwnerError, ScopeError: the filters name no owner, or a wildcard.
            InputError: the format is not known, or the query not valid Unicode.
        """
        check_format(memory_format)
        with self._open_core() as core:
            scope = search_scope(filters, kwargs) if core is not None else None
            if core is not None and scope is not None and isinstance(query, str):
                core.prepare_search(query, scope, memory_format)
            found: dict[str, Any] = super().search(
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
            return found if core is None or scope is None else core.present(found, scope, memory_format)

    def resolve(self, what: Any, *, filters: dict[str, Any] | None = None) -> Any:
        """What handles stand for, for people.

        Args:
            what: what ``search`` returned, a list, a handle, or a text with handles in it.
            filters: owner ids; handles of others stay as they are.

        Returns:
            The same structure with texts in place of valid handles.
        """
        with self._open_core() as core:
            scope = inputs.owner_scope(filters, "in filters") if filters is not None else None
            return what if core is None else core.resolve(what, scope)

    def get(self, memory_id: str) -> dict[str, Any] | None:
        """As Mem0's."""
        with self._open_core():
            item: dict[str, Any] | None = super().get(self._row_id(memory_id))
            return item

    def get_all(
        self,
        *,
        filters: dict[str, Any] | None = None,
        top_k: int = 20,
        show_expired: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As Mem0's; nothing outside the owner that the filters name is listed.

        Raises:
            MissingOwnerError, ScopeError: the filters name no owner, or a wildcard.
        """
        with self._open_core() as core:
            scope = search_scope(filters, kwargs) if core is not None else None
            listed: dict[str, Any] = super().get_all(filters=filters, top_k=top_k, show_expired=show_expired, **kwargs)
            return listed if scope is None else {**listed, "results": within(scope, listed["results"])}

    def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = _UNSET,
        data: str | None = None,
    ) -> dict[str, Any]:
        """As Mem0's: a new revision, with a new handle; the old handle is worth nothing from then on.

        Raises:
            FactError, InputError: what was given cannot be stored; nothing was changed.
        """
        with self._open_core() as core:
            memory_id = self._row_id(memory_id)
            if core is not None:
                text, data, metadata = core.prepare_update(memory_id, text, data, metadata)
            result: dict[str, Any] = super().update(memory_id, text, metadata, expiration_date, data)
            return result

    def delete(self, memory_id: str) -> dict[str, Any]:
        """As Mem0's; the fact's record goes with it."""
        with self._open_core():
            result: dict[str, Any] = super().delete(self._row_id(memory_id))
            return result

    def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """As Mem0's, for one owner: wildcards are refused.

        Raises:
            MissingOwnerError, ScopeError: no owner, or not one.
        """
        with self._open_core() as core:
            owners = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
            scope = (
                inputs.owner_scope(owners, "to delete_all; reset() deletes everything") if core is not None else None
            )
            with emptying() if core is not None else contextlib.nullcontext():
                result: dict[str, Any] = super().delete_all(**owners)
            if core is not None:
                core.forget_turns(scope)
            return result

    def history(self, memory_id: str) -> list[dict[str, Any]]:
        """As Mem0's."""
        with self._open_core():
            changes: list[dict[str, Any]] = super().history(self._row_id(memory_id))
            return changes

    def reset(self) -> None:
        """As Mem0's; all records go too. Raises what store or history raise; what is left then can be used on."""
        with self._open_core(alone=True):
            self._reset(super().reset)

    def close(self) -> None:
        """Release the engine (unless it was given), the store's lock and the history; a new memory can open them."""
        self._close()

    def _delete_memory(self, memory_id: str, existing_memory: Any = None) -> str:
        if existing_memory is None and is_emptying():
            existing_memory = self.vector_store.get(vector_id=memory_id)
            if existing_memory is None:  # another one was faster
                return memory_id
        deleted: str = super()._delete_memory(memory_id, existing_memory)
        return deleted

    def _add_to_vector_store(
        self, messages: Any, metadata: dict[str, Any], filters: dict[str, Any], infer: bool, prompt: str | None = None
    ) -> list[dict[str, Any]]:
        with self._extracting(messages, filters, infer, prompt):
            stored: list[dict[str, Any]] = super()._add_to_vector_store(messages, metadata, filters, infer, prompt)
            return stored
