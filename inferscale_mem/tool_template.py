"""Tools in prompts: as the model's chat template writes them, or as text where it has no words for them.

A template with words for tools shows the tools it is given, calls in assistant messages, and messages of the role
"tool". It is asked once, with a marked conversation. Where one of the three is lost, or calls come out in a form that
``reading.calls`` cannot read back, all three become text, in this form:

    system, in front     You can call tools. To call one, answer with
                         <tool_call>
                         {"name": <the tool's name>, "arguments": <a JSON object>}
                         </tool_call>
                         The tools, with the JSON schemas of their arguments:
                         {"name": …, "description": …, "parameters": {…}}        one line each
    assistant            what it said, and its calls as above
    user                 <tool_response>
                         what a tool answered
                         </tool_response>
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inferscale_mem.errors import ChatTemplateError
from inferscale_mem.reading import Form

Tools = Sequence[Mapping[str, Any]]
"""As chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}."""

Chat = list[dict[str, Any]]
Render = Callable[[Chat, Tools | None], str]

ID_LENGTH = 9
"""Letters and digits of a call's id: what Mistral's templates insist on, and all others take."""

_INSTRUCTION = """\
You can call tools. To call one, answer with
<tool_call>
{"name": <the tool's name>, "arguments": <a JSON object>}
</tool_call>
The tools, with the JSON schemas of their arguments:
"""
_KEY = re.compile(r'^"\s*,\s*"(arguments|parameters)"\s*:')
_BEFORE_NAME = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"$')


@dataclass(frozen=True)
class ToolTraits:
    """What a template does with tools.

    Attributes:
        native: it has words for them.
        parallel: one message may hold several calls.
        form: how calls are written.
        key: how the arguments are called in a call's JSON.
    """

    native: bool
    parallel: bool = True
    form: Form = "hermes"
    key: str = "arguments"


@dataclass(frozen=True)
class CallStart:
    """An answer that begins as a tool call: marks to find the place in a rendered call.

    Attributes:
        name: of the tool; None: the model chooses, so the answer begins in front of the call's object.
    """

    name: str | None
    mark: str

    @classmethod
    def of(cls, name: str | None) -> CallStart:
        """For this tool."""
        return cls(name, f"mark{secrets.token_hex(8)}")

    def message(self) -> dict[str, Any]:
        """The assistant message that is cut off where the model goes on."""
        name, arguments = (self.name, {self.mark: 1}) if self.name is not None else (self.mark, {})
        return {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]}

    def cut(self, text: str) -> str | None:
        """The text up to where the model goes on; None if calls are written in some other way."""
        at = text.rfind(self.mark)
        opening = text.rfind("{", 0, at)
        if at < 0 or opening < 0:
            return None
        between = text[opening:at]
        right = between.strip() == '{"' if self.name is not None else _BEFORE_NAME.search(between)
        return text[:opening].rstrip(" ") if right else None


class ToolTemplate:
    """The tool side of a chat template. Thread-safe.

    Args:
        render: the template, on messages that need no bending.
    """

    def __init__(self, render: Render) -> None:
        self._render = render

    @cached_property
    def traits(self) -> ToolTraits:
        """What the template does with tools."""
        marks = said, described, name, argument, answer = [f"mark{secrets.token_hex(8)}" for _ in range(5)]
        told: Chat = [{"role": "user", "content": said}]
        result = {"role": "tool", "name": name, "content": answer}
        tools = [{"type": "function", "function": {"name": "probe", "description": described, "parameters": {}}}]
        one = call(name, {argument: "x"})
        text = self._try(
            [*told, _calling(one), {**result, "tool_call_id": one["id"]}], tools, required=marks, once=(answer,)
        )
        read = _read_form(text, name) if text is not None else None
        if read is None:
            return ToolTraits(native=False)
        other = call(f"{name}b", {})
        answers = [{**result, "tool_call_id": c["id"], "content": f"{answer}{i}"} for i, c in enumerate((one, other))]
        required = [name, f"{name}b", f"{answer}1"]
        both = self._try([*told, _calling(one, other), *answers], tools, required)
        return ToolTraits(native=True, parallel=both is not None, form=read[0], key=read[1])

    def _try(self, chat: Chat, tools: Tools, required: Sequence[str], once: Sequence[str] = ()) -> str | None:
        try:
            text = self._render(chat, tools)
        except ChatTemplateError:
            return None
        kept = all(mark in text for mark in required) and all(text.count(mark) == 1 for mark in once)
        return text if kept else None

    def prepare(self, chat: Chat, tools: Tools | None, default_system: str) -> tuple[Chat, Tools | None]:
        """Messages and tools as the template can take them.

        Args:
            chat: messages whose content is text.
            tools: what the model may call.
            default_system: what the system says where no message does.
        """
        if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in chat):
            return chat, None
        if not self.traits.native:
            return _as_text(chat, tools, default_system), None
        chat = [_with_short_ids(message) for message in chat]
        return chat if self.traits.parallel else _one_at_a_time(chat), tools or None


def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call as chat templates take it."""
    return {
        "type": "function",
        "id": secrets.token_hex(8)[:ID_LENGTH],
        "function": {"name": name, "arguments": dict(arguments)},
    }


def _calling(*calls: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _read_form(text: str, name: str) -> tuple[Form, str] | None:
    """How the call of ``name`` is written; None if in no known way."""
    before, _, behind = text.rpartition(name)
    tail = before[-80:]
    if re.search(r"\[TOOL_CALLS\]\s*$", tail):
        return "mistral", "arguments"
    key, head = _KEY.match(behind), _BEFORE_NAME.search(tail)
    if key is None or head is None:
        return None
    lead = tail[: head.start()].rstrip(" \n[")
    if lead.endswith("<tool_call>"):
        return "hermes", key[1]
    if lead.endswith("[TOOL_CALLS"):
        return None
    if lead.endswith("[TOOL_CALLS]"):
        return "mistral", key[1]
    return "llama", key[1]


# Where the template has words.


def short_id(given: str | None) -> str:
    """An id that every template takes: the same for the same id."""
    if given and re.fullmatch(rf"[A-Za-z0-9]{{{ID_LENGTH}}}", given):
        return given
    return hashlib.sha256((given or "").encode(errors="surrogatepass")).hexdigest()[:ID_LENGTH]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {**message, "tool_call_id": short_id(message.get("tool_call_id"))}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [{**c, "id": short_id(c.get("id"))} for c in calls]} if calls else message


def _one_at_a_time(chat: Chat) -> Chat:
    """Each call in a message of its own, in front of its answer."""
    spread: Chat = []
    waiting: dict[str, dict[str, Any]] = {}
    for message in chat:
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if len(calls) > 1:
            spread.append({**message, "tool_calls": [calls[0]]})
            waiting = {c["id"]: {**message, "content": "", "tool_calls": [c]} for c in calls[1:]}
        elif message["role"] == "tool" and (late := waiting.pop(message["tool_call_id"], None)):
            spread += [late, message]
        else:
            spread.append(message)
    return spread


# Where it has none.


def _as_text(chat: Chat, tools: Tools | None, default_system: str) -> Chat:
    told = [_told(message) for message in chat]
    if not tools:
        return told
    text = _INSTRUCTION + "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    first = next((i for i, message in enumerate(told) if message["role"] == "system"), None)
    if first is None:
        return [{"role": "system", "content": f"{text}\n\n{default_system}"}, *told]
    system = {**told[first], "content": f"{text}\n\n{told[first]['content']}"}
    return [*told[:first], system, *told[first + 1 :]]


def _told(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    said = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*said, *map(_call_text, calls)])}


def _call_text(one: Mapping[str, Any]) -> str:
    function = one["function"]
    content = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>"
