"""What ``ChatInferScale.bind`` gives: a RunnableBinding whose tools and schemas keep what was bound before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableBinding

from inferscale_mem.adapters.langchain.structured import FORM_OPTIONS, Method, structured


class ChatBinding(RunnableBinding[LanguageModelInput, AIMessage]):
    """A chat model with options or config bound.

    LangChain's own binding has ``bind_tools`` and ``with_structured_output`` from the model it binds, which knows
    nothing of what is bound: memories, owner and the like would be lost without a word. Here they stay.
    """

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """As ``ChatInferScale.bind_tools``, over what is bound already."""
        bound = cast(Any, self.bound).bind_tools(tools, tool_choice=tool_choice, strict=strict, **kwargs)
        return self.bind(**bound.kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        include_raw: bool = False,
        method: Method = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """As ``ChatInferScale.with_structured_output``, over what is bound already but tools and ``response_format``,
        which it replaces.
        """
        rest = {name: value for name, value in self.kwargs.items() if name not in FORM_OPTIONS}
        chat = self.model_copy(update={"kwargs": rest})
        return structured(chat, schema, method, include_raw=include_raw, strict=strict, options=kwargs)

    @classmethod
    def lc_id(cls) -> list[str]:
        """Written down, and so loaded, as the RunnableBinding that LangChain knows."""
        return RunnableBinding.lc_id()


def keeping(bound: Runnable[LanguageModelInput, AIMessage]) -> ChatBinding:
    """The same binding, as one that keeps what is bound."""
    assert isinstance(bound, RunnableBinding)
    return ChatBinding(**{name: getattr(bound, name) for name in RunnableBinding.model_fields})
