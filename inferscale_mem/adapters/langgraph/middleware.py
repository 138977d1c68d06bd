"""A middleware for ``create_agent``: recalls before each model call, and remembers after the agent has answered."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.runtime import Runtime

from inferscale_mem.adapters.langchain import ChatInferScale
from inferscale_mem.adapters.langchain.context import with_context
from inferscale_mem.errors import ConfigError, ScopeError
from inferscale_mem.types import OWNER_FIELDS, Scope

logger = logging.getLogger(__name__)

Handler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]


class InferScaleMemoryMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Gives the model the memories that fit the latest human message; their KV is injected.

    Whose memories: the run's config (metadata, then configurable), then its context, then what is given here; the first
    of these that names an owner. The model should be a ChatInferScale; any other gets handles in its system message,
    which is right for an OpenAI client whose server is ``inferscale-mem serve``.

    Args:
        memory: an InferScaleMemory, or an AsyncInferScaleMemory for agents that run asynchronously.
        user_id: whose memories, where the run does not say; likewise ``agent_id`` and ``run_id``.
        top_k: memories a request.
        threshold: least similarity.
        add: remember the human message and the answer when the agent is done.
        infer: of ``add``: have the memory's LLM extract facts; False keeps the human message as it was said.

    Raises:
        ConfigError: that is no memory.
        ScopeError: an owner that names nobody.
    """

    def __init__(
        self,
        memory: Any,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 5,
        threshold: float = 0.1,
        add: bool = False,
        infer: bool = True,
    ) -> None:
        super().__init__()
        if not all(callable(getattr(memory, name, None)) for name in ("search", "add")):
            raise ConfigError(f"memory={memory!r} is no memory; give an InferScaleMemory or AsyncInferScaleMemory.")
        given = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        self._own = Scope.of(given) if any(given.values()) else None
        self._memory = memory
        self._top_k, self._threshold = top_k, threshold
        self._add, self._infer = add, infer

    # Before: recall.

    def wrap_model_call(self, request: ModelRequest[Any], handler: Handler) -> ModelResponse[Any]:
        """Search, and hand the memories on."""
        query = _latest(request.messages, HumanMessage)
        if not query:
            return handler(request)
        scope = self._scope(request.runtime)
        return handler(_with_memories(request, self._now(self._search(query, scope)), scope))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncHandler) -> ModelResponse[Any]:
        """As wrap_model_call."""
        query = _latest(request.messages, HumanMessage)
        if not query:
            return await handler(request)
        scope = self._scope(request.runtime)
        found = await self._later(lambda: self._search(query, scope))
        return await handler(_with_memories(request, found, scope))

    def _search(self, query: str, scope: Scope) -> Any:
        return self._memory.search(query, filters=scope.owners, top_k=self._top_k, threshold=self._threshold)

    # After: remember.

    def after_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Remember the turn, if asked to."""
        if self._add and (turn := self._turn(state["messages"])):
            _tell(self._now(self._remember(turn, self._scope(runtime))))
        return None

    async def aafter_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        """As after_agent."""
        if self._add and (turn := self._turn(state["messages"])):
            scope = self._scope(runtime)
            _tell(await self._later(lambda: self._remember(turn, scope)))
        return None

    def _turn(self, messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
        said = _latest(messages, HumanMessage)
        if not said:
            return []
        answer = _latest(messages, AIMessage) if self._infer else ""
        turn = [{"role": "user", "content": said}]
        return [*turn, {"role": "assistant", "content": answer}] if answer else turn

    def _remember(self, turn: list[dict[str, str]], scope: Scope) -> Any:
        return self._memory.add(turn, infer=self._infer, **scope.owners)

    # Whose, and how.

    def _scope(self, runtime: Runtime[Any] | None) -> Scope:
        told = with_context({}, None)
        if isinstance(told.get("scope"), Scope):
            return Scope.of(told["scope"].owners)
        context = getattr(runtime, "context", None)
        for place in (told.get("scope"), told, context):
            owners = {name: _read(place, name) for name in OWNER_FIELDS}
            if any(owners.values()):
                return Scope.of(owners)
        if self._own is not None:
            return self._own
        raise ScopeError(
            "Nobody said whose memories these are; give user_id= to the middleware, in the run's config "
            '({"configurable": {"user_id": …}}) or in its context.'
        )

    def _now(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigError("This memory is asynchronous; use ainvoke or astream, or give an InferScaleMemory.")
        return result

    async def _later(self, work: Callable[[], Any]) -> Any:
        if inspect.iscoroutinefunction(self._memory.search):
            return await work()
        return await asyncio.to_thread(work)


def _tell(added: Any) -> None:
    if not added["results"]:
        logger.info("Nothing was stored of this turn: the extraction found no fact in it that is new.")


def _read(place: Any, name: str) -> Any:
    return place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)


def _latest(messages: Sequence[BaseMessage], kind: type[BaseMessage]) -> str:
    return next((str(message.text) for message in reversed(messages) if isinstance(message, kind)), "")


def _with_memories(request: ModelRequest[Any], found: Mapping[str, Any], scope: Scope) -> ModelRequest[Any]:
    hits = found["results"]
    if isinstance(request.model, ChatInferScale):
        settings = {**request.model_settings, "memories": hits, "scope": scope.owners}
        return request.override(model_settings=settings)
    if not hits:
        return request
    said = f"{request.system_message.text}\n\n" if request.system_message else ""
    block = "\n".join(f"- {hit['memory']}" for hit in hits)
    return request.override(system_message=SystemMessage(f"{said}Memories:\n{block}"))
