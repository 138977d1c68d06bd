"""ChatInferScale: a LangChain chat model whose memories are injected as KV, not prefilled as text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from inferscale_mem.adapters.langchain.answers import Answers
from inferscale_mem.adapters.langchain.detached import Detached
from inferscale_mem.adapters.langchain.messages import to_template
from inferscale_mem.adapters.langchain.options import (
    SAMPLING_FIELDS,
    Options,
    read_options,
    read_sampling,
    read_scope,
)
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.service import MemoryService
from inferscale_mem.types import OWNER_FIELDS, PromptPlan, Scope

_OF_SERVERS = ("api_key", "timeout", "max_retries")
"""Parameters every LangChain chat model takes that mean nothing without a server: accepted, and without effect."""


class ChatInferScale(BaseChatModel):
    """A chat model over an engine of this process.

    Give one of ``memory``, ``service`` and ``engine``. With an engine alone there are no facts: every handle is
    unknown, stays out of the prompt and is counted in ``response_metadata["inferscale"]``.

    Memories come as handles in system messages, or as ``memories=`` of a call (what ``search`` returned, a list of its
    results, or a list of handles), which ``bind`` can fix. Every other option of a call (sampling, ``scope``,
    ``user_id``, ``agent_id``) replaces the model's own. A run is named in ``scope``: of a call's ``run_id`` LangChain
    makes an id of its traces.

    Errors of this package reach the caller as they are.
    """

    memory: Any = Field(default=None, exclude=True, repr=False)
    """An InferScaleMemory or AsyncInferScaleMemory; its engine and facts are used."""
    service: Any = Field(default=None, exclude=True, repr=False)
    """A MemoryService."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An Engine."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    """Stop strings; those of a call replace them."""
    n: int = 1
    """Answers a request; more than one cannot be streamed."""
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool | int | None = None
    """True, or how many a token, for ``response_metadata["logprobs"]``."""
    top_logprobs: int | None = None
    scope: Mapping[str, str] | Scope | None = None
    """Whose facts may be shown; None takes it from the handles."""
    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None
    streaming: bool = False

    _detached: Detached | None = PrivateAttr(default=None)

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _accept_server_parameters(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if name not in _OF_SERVERS}

    @model_validator(mode="after")
    def _check(self) -> ChatInferScale:
        given = [name for name in ("memory", "service", "engine") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"Give exactly one of memory=, service= and engine=; got {', '.join(given) or 'none'}.")
        try:
            read_sampling(self._defaults)
            read_scope(self._defaults)
        except InputError as error:
            raise ConfigError(str(error)) from error
        return self

    # What LangChain calls.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._options(stop, kwargs)
        plan = self._plan(messages, options)
        answers = self._answers(plan)
        for chunk in self._service.generate(plan, options.sampling):
            answers.add(chunk)
        return answers.result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._options(stop, kwargs)
        plan = await self._service.aplan(to_template(messages), options.memories, options.scope)
        answers = self._answers(plan)
        async for chunk in self._service.agenerate(plan, options.sampling):
            answers.add(chunk)
        return answers.result()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self._options(stop, kwargs, stream=True)
        plan = self._plan(messages, options)
        answers = self._answers(plan)
        with contextlib.closing(self._service.generate(plan, options.sampling)) as chunks:
            for chunk in chunks:
                if piece := answers.stream(chunk):
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=piece)
                    yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._options(stop, kwargs, stream=True)
        plan = await self._service.aplan(to_template(messages), options.memories, options.scope)
        answers = self._answers(plan)
        async with contextlib.aclosing(self._service.agenerate(plan, options.sampling)) as chunks:
            async for chunk in chunks:
                if piece := answers.stream(chunk):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=piece)
                    yield piece

    @property
    def _llm_type(self) -> str:
        return "inferscale"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All of this model that an answer depends on: LangChain's cache keys on it, and on the call's keywords.

        The model's own options are nested, since keywords of the same names would take their places even where a call
        leaves them to the model.
        """
        service = self._service
        scope = read_scope(self._defaults)
        return {
            "model_name": self.model_name,
            "engine": service.engine.info.fingerprint,
            "store": service.signer.store,
            "encoding": dataclasses.asdict(service.config),
            "defaults": {
                "scope": scope.key if scope else None,
                **{name: getattr(self, name) for name in SAMPLING_FIELDS},
            },
        }

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """False: a live engine cannot be written down."""
        return False

    # A memory's engine starts when it is first needed, which takes long: async callers wait for it off their loop.

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """See BaseChatModel."""
        await asyncio.to_thread(lambda: self._service)
        return await super().agenerate(*args, **kwargs)

    async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[AIMessageChunk]:
        """See BaseChatModel."""
        await asyncio.to_thread(lambda: self._service)
        chunks = cast(AsyncGenerator[AIMessageChunk], super().astream(*args, **kwargs))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    # What users call beside.

    @property
    def model_name(self) -> str:
        """The engine's model."""
        return str(self._service.engine.info.model)

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of ``text``, spellings of special tokens as ordinary characters."""
        return self._service.engine.tokenizer.encode(text, literal=True)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the whole prompt these messages make, template included, each handle at its fact's real length."""
        if tools:
            raise InputError("This model takes no tools yet; count without them.")
        return len(self._plan(messages, self._options(None, {})).token_ids)

    # Shared by the four ways to answer.

    @property
    def _service(self) -> MemoryService:
        if self.memory is not None:
            service = self.memory.service
        elif self.service is not None:
            service = self.service
        else:
            if self._detached is None:
                self._detached = Detached(self.engine)
            service = self._detached.service
        assert isinstance(service, MemoryService)
        return service

    @property
    def _defaults(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*SAMPLING_FIELDS, "scope", *OWNER_FIELDS)}

    def _options(self, stop: list[str] | None, call: Mapping[str, Any], *, stream: bool = False) -> Options:
        given = {**call, **({"stop": stop} if stop is not None else {})}
        options = read_options(self._defaults, given, self.model_name)
        if stream and options.sampling.n != 1:
            raise InputError(f"n={options.sampling.n} answers cannot be streamed; use invoke or generate.")
        return options

    def _plan(self, messages: Sequence[BaseMessage], options: Options) -> PromptPlan:
        return self._service.plan(to_template(messages), options.memories, options.scope)

    def _answers(self, plan: PromptPlan) -> Answers:
        return Answers(self._service.engine.tokenizer, self.model_name, len(plan.token_ids))
