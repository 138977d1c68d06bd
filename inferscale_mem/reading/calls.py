"""Tool calls in an answer's text, in the forms that model families write them.

=========  ==========================================================================================================
form       an answer with calls
=========  ==========================================================================================================
hermes     ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, again and again, text around them (Qwen, Hermes)
llama      ``{"name": …, "parameters": {…}}`` and nothing else; several with ``;`` in between (Llama 3)
mistral    ``[TOOL_CALLS]`` and a list of ``{"name": …, "arguments": {…}}``, or ``name[ARGS]{…}`` (Mistral)
=========  ==========================================================================================================

Calls are handed on while they are being written. What begins like a call and is none (no JSON, no name, arguments that
are not an object) comes as a call whose arguments are no JSON object, for the caller to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from inferscale_mem.reading.held import split_at, starts
from inferscale_mem.reading.json_scanner import JsonScanner
from inferscale_mem.reading.pieces import Call, Piece, Text

Form = Literal["hermes", "llama", "mistral"]


@dataclass(frozen=True)
class Marks:
    """What calls stand between; an opening of "" is for answers that are calls from their first character."""

    opening: str
    closing: str


MARKS: dict[Form, Marks] = {
    "hermes": Marks("<tool_call>", "</tool_call>"),
    "llama": Marks("", ""),
    "mistral": Marks("[TOOL_CALLS]", ""),
}

_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_NAMED = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_SEPARATORS = " \t\r\n,;[]"


class CallReader:
    """Tells calls from text.

    Args:
        form: how this model writes calls.
        inside: the prompt has already written what comes before the first call.
    """

    def __init__(self, form: Form, *, inside: bool = False) -> None:
        self._form = form
        self._marks = MARKS[form]
        self._buffer = ""
        self._count = 0
        self._state = self._between if inside else self._outside
        self._scanner = JsonScanner()
        self._wrapped = False

    def add(self, text: str) -> Iterator[Piece]:
        """What the next characters are, as far as that can be told."""
        self._buffer += text
        going = True
        while going and self._buffer:
            state = self._state
            pieces, going = state()
            yield from pieces

    def finish(self) -> Iterator[Piece]:
        """What was held back."""
        held, self._buffer = self._buffer, ""
        if self._state == self._object:
            yield self._broken(held)
        elif self._state in (self._outside, self._text) and held:
            yield Text(held)

    # States: each handles the start of the buffer; the pieces found, and whether there may be more.

    def _outside(self) -> tuple[list[Piece], bool]:
        if not self._marks.opening:
            lead = self._buffer.lstrip()
            if lead:
                self._state = self._between if lead[0] == "{" else self._text
            return [], bool(lead)
        said, self._buffer, found = split_at(self._buffer, self._marks.opening)
        if found:
            self._state = self._between
        return [Text(said)] if said else [], found

    def _text(self) -> tuple[list[Piece], bool]:
        said, self._buffer = self._buffer, ""
        return [Text(said)], False

    def _between(self) -> tuple[list[Piece], bool]:
        self._buffer = self._buffer.lstrip(_SEPARATORS if self._form != "mistral" else " \t\r\n,;]")
        if self._form == "mistral" and self._buffer.startswith("["):
            if starts(self._marks.opening, self._buffer):
                return [], False
            opening = self._marks.opening if self._buffer.startswith(self._marks.opening) else "["
            self._buffer = self._buffer[len(opening) :]
            return [], True
        closing = self._marks.closing
        if closing and self._buffer.startswith(closing):
            self._buffer = self._buffer[len(closing) :]
            if self._buffer.strip() == "":
                self._buffer = ""
            self._state = self._outside
            return [], True
        if self._buffer.startswith("{"):
            self._state = self._object
            return [], True
        return self._named()

    def _named(self) -> tuple[list[Piece], bool]:
        """Something else than a JSON object where a call should be."""
        if not self._buffer or starts(self._marks.closing, self._buffer):
            return [], False
        if self._form == "mistral":
            if match := _NAMED.match(self._buffer):
                self._buffer = self._buffer[match.end() :]
                return [self._start(match["name"], wrapped=False)], True
            if re.fullmatch(r"[\w.-]+(\[[^{]*)?\s*", self._buffer):
                return [], False
        if self._form != "hermes":
            self._state = self._text
            return [], True
        said, behind, found = split_at(self._buffer, self._marks.closing)
        self._state = self._object  # what is held until the end is broken
        if not found:
            return [], False
        self._buffer, self._state = behind, self._outside
        return [self._broken(said)], True

    def _object(self) -> tuple[list[Piece], bool]:
        if match := _HEAD.match(self._buffer):
            self._buffer = self._buffer[match.end() :]
            return [self._start(json.loads(match["name"], strict=False), wrapped=True)], True
        end = self._end_of_broken()
        if end is None:
            return [], False
        raw, self._buffer = self._buffer[:end], self._buffer[end:]
        self._state = self._between
        if self._form == "llama" and self._count == 0 and '"name"' not in raw:
            self._state = self._text  # an answer in JSON, and no call
            return [Text(raw)], True
        return [self._whole(raw)], True

    def _end_of_broken(self) -> int | None:
        """Where an object ends that does not begin as calls do."""
        if not self._buffer.startswith("{"):
            before, _, found = split_at(self._buffer, self._marks.closing)
            return len(before) if found else None
        end = JsonScanner().end(self._buffer)
        if end is None and self._marks.closing and self._marks.closing in self._buffer:
            return self._buffer.index(self._marks.closing)
        return end

    def _arguments(self) -> tuple[list[Piece], bool]:
        end = self._scanner.end(self._buffer)
        told = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(told) :]
        if end is not None:
            self._scanner = JsonScanner(depth=1)
            self._state = self._rest if self._wrapped else self._between
        return [Call(self._count - 1, None, told)] if told else [], end is not None

    def _rest(self) -> tuple[list[Piece], bool]:
        """What stands behind the arguments in a call's object, up to its end."""
        end = self._scanner.end(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = self._between
        return [], end is not None

    # Calls.

    def _start(self, name: str, *, wrapped: bool) -> Call:
        self._scanner, self._wrapped = JsonScanner(), wrapped
        self._state = self._arguments
        self._count += 1
        return Call(self._count - 1, name, "")

    def _whole(self, raw: str) -> Call:
        """A complete object: arguments before the name, no arguments, or no call at all."""
        try:
            call = json.loads(raw, strict=False)
            name = call["name"]
        except (ValueError, KeyError):
            return self._broken(raw)
        if not isinstance(name, str):
            return self._broken(raw)
        arguments: Any = next((call[key] for key in ("arguments", "parameters") if key in call), {})
        self._count += 1
        return Call(self._count - 1, name, json.dumps(arguments, ensure_ascii=False))

    def _broken(self, raw: str) -> Call:
        # As a JSON string, which is no object, so that nobody takes half of it for arguments.
        self._count += 1
        return Call(self._count - 1, "", json.dumps(raw, ensure_ascii=False))
