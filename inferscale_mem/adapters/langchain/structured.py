"""``with_structured_output``: answers that fit a schema, by guided decoding."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from inferscale_mem.errors import InputError

if TYPE_CHECKING:
    from inferscale_mem.adapters.langchain.binding import ChatBinding
    from inferscale_mem.adapters.langchain.chat_model import ChatInferScale

Method = Literal["function_calling", "json_schema", "json_mode"]
FORM_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
"""Options of a call that say what form its answer has."""


def structured(
    chat: ChatInferScale | ChatBinding,
    schema: Any,
    method: Method,
    *,
    include_raw: bool,
    strict: bool | None,
    options: dict[str, Any],
) -> Runnable[Any, Any]:
    """The chat model with its answers bound to a schema and parsed.

    Raises:
        InputError: a method nobody knows, or no schema where one is needed.
    """
    if schema is None and method != "json_mode":
        raise InputError(f"method={method!r} needs a schema.")
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    told = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    parser: Any
    if method == "function_calling":
        tool = convert_to_openai_tool(schema, strict=strict)["function"]["name"]
        bound = chat.bind_tools([schema], tool_choice=tool, strict=strict, ls_structured_output_format=told, **options)
        parser = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=tool, first_tool_only=True)
        )
    elif method in ("json_schema", "json_mode"):
        wanted: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            json_schema = convert_to_json_schema(schema)
            wanted = {
                "type": "json_schema",
                "json_schema": {"name": json_schema.get("title", ""), "schema": json_schema},
            }
        if schema is not None:
            options = {**options, "ls_structured_output_format": told}
        bound = chat.bind(response_format=wanted, **options)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    else:
        raise InputError(f"method={method!r} is not known; use function_calling, json_schema or json_mode.")
    if not include_raw:
        plain: Runnable[Any, Any] = bound | parser
        return plain
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    # The model comes first, and not within a map: a chain gives a call's options to its first step, a map to nobody.
    raw = RunnableMap(raw=RunnablePassthrough())
    whole: Runnable[Any, Any] = bound | raw | parsed.with_fallbacks([failed], exception_key="parsing_error")
    return whole
