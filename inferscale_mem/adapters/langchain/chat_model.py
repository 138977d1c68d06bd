"""ChatInferScale: a LangChain chat model whose memories are injected as KV, not prefilled as text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig

from inferscale_mem.adapters.langchain.answers import Answers
from inferscale_mem.adapters.langchain.binding import ChatBinding, keeping
from inferscale_mem.adapters.langchain.context import with_config, with_context
from inferscale_mem.adapters.langchain.identity import ChatIdentity
from inferscale_mem.adapters.langchain.messages import to_template
from inferscale_mem.adapters.langchain.options import Options, read_options
from inferscale_mem.adapters.langchain.structured import Method, structured
from inferscale_mem.adapters.langchain.tools import as_tools, read_calling
from inferscale_mem.errors import InputError
from inferscale_mem.types import OWNER_FIELDS, PromptPlan

_ALIVE = "_alive"
"""Keyword that goes into LangChain's cache key and nowhere else: the memories that are valid now."""


class ChatInferScale(ChatIdentity):
    """A chat model over an engine of this process, or over a server.

    Give one of ``memory``, ``service`` and ``engine``. With none of them an engine is opened when it is first needed:
    as ``model``, ``base_url`` and ``config`` say, else the environment, else with the packaged model. Such an engine,
    and one given as ``engine``, has no facts: every handle is unknown, stays text and is counted in
    ``response_metadata["inferscale"]``.

    Memories come as handles in system messages, or as ``memories=`` of a call (what ``search`` returned, a list of its
    results, or a list of handles), which ``bind`` can fix. Every other option of a call (sampling, tools, ``scope``,
    ``user_id``, ``agent_id``) replaces the model's own. A run is named in ``scope``: of a call's ``run_id`` LangChain
    makes an id of its traces. What a call leaves open is looked for in the RunnableConfig (``context.py``).

    Errors of this package reach the caller as they are.
    """

    # What LangChain calls.

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Before LangChain looks into its cache: whose memories, and which, must be part of the key.
        told = self._told(messages, kwargs, run_manager)
        return super()._generate_with_cache(messages, stop=stop, run_manager=run_manager, **told)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        told = await asyncio.to_thread(self._told, messages, kwargs, run_manager)
        return await super()._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **told)

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
        for chunk in self._service.generate(plan, options.sampling_for(plan.reading)):
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
        plan = await asyncio.to_thread(self._plan, messages, options)
        answers = self._answers(plan)
        async for chunk in self._service.agenerate(plan, options.sampling_for(plan.reading)):
            answers.add(chunk)
        return answers.result()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self._options(stop, with_context(kwargs, run_manager), stream=True)
        plan = self._plan(messages, options)
        answers = self._answers(plan)
        with contextlib.closing(self._service.generate(plan, options.sampling_for(plan.reading))) as chunks:
            for chunk in chunks:
                if piece := answers.stream(chunk):
                    if run_manager:
                        run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._options(stop, with_context(kwargs, run_manager), stream=True)
        plan = await asyncio.to_thread(self._plan, messages, options)
        answers = self._answers(plan)
        sampling = options.sampling_for(plan.reading)
        async with contextlib.aclosing(self._service.agenerate(plan, sampling)) as chunks:
            async for chunk in chunks:
                if piece := answers.stream(chunk):
                    if run_manager:
                        await run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    # What is bound, tools and schemas: each keeps what was bound before.

    def bind(self, **kwargs: Any) -> ChatBinding:  # type: ignore[override] # LangChain's own is private and new
        """The model with options of its calls fixed: ``memories``, owners, sampling, …"""
        return keeping(super().bind(**kwargs))

    def with_config(self, config: RunnableConfig | None = None, **kwargs: Any) -> ChatBinding:
        """See Runnable."""
        return keeping(super().with_config(config, **kwargs))

    def with_listeners(self, **listeners: Any) -> ChatBinding:
        """See Runnable."""
        return keeping(super().with_listeners(**listeners))

    def with_types(self, **types: Any) -> ChatBinding:
        """See Runnable."""
        return keeping(super().with_types(**types))

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools it may call.

        Args:
            tools: functions, pydantic classes, TypedDicts, LangChain tools, or dicts as OpenAI has them.
            tool_choice: "auto" (default): the model decides; "none"; "any", "required" or True: one of the tools; or
                one tool's name, plain or as ``{"type": "function", "function": {"name": …}}``. A call that is asked
                for is decoded under the tool's JSON schema, so that its arguments fit.
            strict: as LangChain's ``convert_to_openai_tool`` takes it.
            kwargs: further options to bind.

        Raises:
            InputError: no such tool, or something that is no tool.
        """
        shown = as_tools(tools, strict)
        read_calling(shown, tool_choice)
        chosen = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self.bind(tools=shown, **chosen, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        include_raw: bool = False,
        method: Method = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers that fit a schema, as objects.

        Args:
            schema: a pydantic class, a TypedDict, or a dict (JSON schema, or a tool as OpenAI has it).
            include_raw: give ``{"raw", "parsed", "parsing_error"}``, and do not raise where an answer cannot be parsed.
            method: "function_calling" shows the schema to the model as a tool, which it then has to call;
                "json_schema" constrains the answer to it and shows it nothing; "json_mode" constrains the answer to
                any JSON object, so tell the model which.
            strict: as LangChain's ``convert_to_openai_tool`` takes it.
            kwargs: further options to bind.

        Raises:
            InputError: no schema, or a method nobody knows.
        """
        return structured(self, schema, method, include_raw=include_raw, strict=strict, options=kwargs)

    # A call's own config is read here: LangChain does not pass it on.

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """See BaseChatModel."""
        return super().invoke(input, config, stop=stop, **with_config(kwargs, config))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """See BaseChatModel."""
        return await super().ainvoke(input, config, stop=stop, **with_config(kwargs, config))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """See BaseChatModel."""
        return super().stream(input, config, stop=stop, **with_config(kwargs, config))

    # A memory's engine starts when it is first needed, which takes long: async callers wait for it off their loop.

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """See BaseChatModel."""
        await asyncio.to_thread(lambda: self._service)
        return await super().agenerate(*args, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """See BaseChatModel."""
        await asyncio.to_thread(lambda: self._service)
        told = with_config(kwargs, config)
        chunks = cast(AsyncGenerator[AIMessageChunk], super().astream(input, config, stop=stop, **told))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    # What users call beside.

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of ``text``, spellings of special tokens as ordinary characters."""
        return self._service.engine.tokenizer.encode(text, literal=True)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the whole prompt these messages make, template included, each handle at its fact's real length."""
        options = self._options(None, with_context({"tools": tools} if tools else {}, None))
        return len(self._plan(messages, options).token_ids)

    # Shared by the four ways to answer.

    def _told(self, messages: list[BaseMessage], call: Mapping[str, Any], run_manager: Any) -> dict[str, Any]:
        """The call's keywords with its context, as a cache key needs them: whose memories, which, and which live."""
        told = with_context(call, run_manager)
        options = self._options(None, told)
        told = {name: value for name, value in told.items() if name not in (*OWNER_FIELDS, "scope", "memories")}
        told |= {"scope": options.scope, "memories": options.memories}
        if self.cache is not False and (self.cache or get_llm_cache()):
            told[_ALIVE] = self._service.alive(
                to_template(messages), options.memories, options.scope, options.human_handles
            )
        return told

    def _options(self, stop: list[str] | None, call: Mapping[str, Any], *, stream: bool = False) -> Options:
        given = {**call, **({"stop": stop} if stop is not None else {})}
        given.pop(_ALIVE, None)
        options = read_options(self._defaults, given, (self.model_name, self.model, self._service.engine.info.model))
        if stream and options.sampling.n != 1:
            raise InputError(f"n={options.sampling.n} answers cannot be streamed; use invoke or generate.")
        return options

    def _plan(self, messages: Sequence[BaseMessage], options: Options) -> PromptPlan:
        calling = options.calling
        return self._service.plan(
            to_template(messages),
            options.memories,
            options.scope,
            tools=calling.tools,
            call=calling.call,
            position=options.position,
            human_handles=options.human_handles,
        )

    def _answers(self, plan: PromptPlan) -> Answers:
        return Answers(self._service.engine.tokenizer, self.model_name, plan)
