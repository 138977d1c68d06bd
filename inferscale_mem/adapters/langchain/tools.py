"""Tools and schemas of a call: from what LangChain lets people write to what templates and engines take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json_schema import dereference_refs

from inferscale_mem.errors import InputError
from inferscale_mem.prompt import ANY_TOOL
from inferscale_mem.reading import Reading

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The JSON schema of json_mode."""


@dataclass(frozen=True)
class Calling:
    """What a call may do with tools.

    Attributes:
        tools: those the model sees, as chat templates take them.
        call: the tool the answer has to call, ``ANY_TOOL`` for one of them, None if it may as well say something.
    """

    tools: tuple[dict[str, Any], ...] = ()
    call: str | None = None

    def schema(self, reading: Reading) -> dict[str, Any] | None:
        """What the answer has to look like behind a prompt that has begun the call."""
        if self.call is None:
            return None
        arguments = {tool["function"]["name"]: _arguments(tool) for tool in self.tools}
        if self.call != ANY_TOOL:
            return arguments[self.call]
        return {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"type": "string", "enum": [name]}, reading.key: schema},
                    "required": ["name", reading.key],
                    "additionalProperties": False,
                }
                for name, schema in arguments.items()
            ]
        }


NO_TOOLS = Calling()


def as_tools(tools: Sequence[Any], strict: bool | None = None) -> list[dict[str, Any]]:
    """Functions, classes, LangChain tools or dicts, as chat templates take them.

    Raises:
        InputError: something in it is no tool.
    """
    try:
        return [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"A tool cannot be read: {error}") from error


def read_calling(tools: Any, choice: Any) -> Calling:
    """Tools and ``tool_choice`` of a call.

    ``tool_choice``: "auto" or None, "none", "any" or "required" or True, a tool's name, or
    ``{"type": "function", "function": {"name": …}}``.

    Raises:
        InputError: a choice that is not to be had, or something that is no tool.
    """
    shown = tuple(as_tools(tools or ()))
    names = [tool["function"]["name"] for tool in shown]
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or {}).get("name", choice)
    if choice in (None, False, "auto"):
        return Calling(shown)
    if choice == "none":
        return Calling()
    if not names:
        raise InputError(f"tool_choice={choice!r} needs tools; bind some with bind_tools.")
    if choice in (True, "any", "required"):
        return Calling(shown, names[0] if len(names) == 1 else ANY_TOOL)
    if choice not in names:
        raise InputError(f"tool_choice={choice!r} is not among the tools: {', '.join(names)}; nor auto, none or any.")
    return Calling(shown, choice)


def read_response_format(given: Any) -> dict[str, Any] | None:
    """The JSON schema of a ``response_format``, as OpenAI's interface has it.

    Raises:
        InputError: a format nobody knows.
    """
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return ANY_OBJECT
    schema = given.get("json_schema") if isinstance(given, Mapping) and kind == "json_schema" else None
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        raise InputError(
            f"response_format={given!r} is not known; use {{'type': 'json_schema', 'json_schema': {{'schema': …}}}}, "
            "{'type': 'json_object'} or {'type': 'text'}."
        )
    return dict(schema["schema"])


def _arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without references, and closed if the tool does not say."""
    schema = dict(tool["function"].get("parameters") or {})
    if "$defs" in schema or "definitions" in schema:
        schema = dereference_refs(schema)
        schema = {name: value for name, value in schema.items() if name not in ("$defs", "definitions")}
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}
