"""How our own LLM is asked for the facts in a conversation: which sentences to keep, or to write them itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from inferscale_mem.adapters.mem0.errors import ExtractionError

Prompt = list[Mapping[str, Any]]

_COPY = """Copy the sentences in which the {about} says something lasting about themselves or people they know. Answer \
in JSON. If the {about} only asks or greets, the list is empty."""

_WRITE = """You write down what should be remembered about the {about}. Read the conversation and list every lasting \
fact that the {about} states: names, people, places, dates, plans, tastes, health, work, belongings. One short, \
complete sentence per fact, in the {about}'s own words and language, with names instead of "it" or "there". Leave out \
questions, greetings, small talk and anything that was not said. If there is nothing to remember, the list is empty.
Answer in JSON: {{"memory": [{{"text": "..."}}]}}"""

_EXAMPLES = (
    (
        "{about}: Hi! I moved to Lyon in May, and I can't stand olives.\n{other}: Noted!",
        ("I moved to Lyon in May.", "I can't stand olives."),
    ),
    ("{about}: What's the weather like?\n{other}: Sunny.", ()),
    ("{about}: My sister Mia plays the violin.\n{other}: How nice!", ("My sister Mia plays the violin.",)),
)

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"')\]]*\s+|(?<=[。！？])|\n+")  # noqa: RUF001  # full-width marks are meant
_QUESTION = ("?", "？", "؟")  # noqa: RUF001
_DECISION = re.compile(r"\[\s*([\]{])")


def schema(texts: Sequence[str] | None = None) -> dict[str, Any]:
    """What a reply is constrained to: facts as Mem0's pipeline reads them; only ``texts``, if there are any given."""
    text: dict[str, Any] = {"type": "string", "minLength": 3, "maxLength": 240}
    return {
        "type": "object",
        "properties": {
            "memory": {
                "type": "array",
                "maxItems": 16 if texts is None else len(texts),
                "items": {
                    "type": "object",
                    "properties": {"text": text if texts is None else {"enum": list(texts)}},
                    "required": ["text"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["memory"],
        "additionalProperties": False,
    }


def copy_prompt(sentence: str, about: str, instructions: str = "") -> Prompt:
    """Asks whether to keep one sentence."""
    return [*_head(_COPY, about, instructions), {"role": "user", "content": f"{about}: {sentence}"}]


def write_prompt(part: str, about: str, instructions: str = "") -> Prompt:
    """Asks for the facts in a part of a conversation."""
    return [*_head(_WRITE, about, instructions), {"role": "user", "content": part}]


def kept(reply: Iterable[str]) -> bool:
    """Whether the reply to a ``copy_prompt`` keeps the sentence; reads only as much of it as that takes.

    Raises:
        ExtractionError: it does not say.
    """
    text = ""
    for piece in reply:
        text += piece
        if match := _DECISION.search(text):
            return match[1] == "{"
    raise ExtractionError(f"The model's reply {text[:100]!r} keeps no sentence and leaves out none; try again.")


def sentences(messages: Sequence[Mapping[str, Any]], speaker: str) -> list[str]:
    """What one side says, sentence by sentence, each once; questions and what has no words are left out."""
    said = [m["content"] for m in messages if m.get("role") == speaker and isinstance(m.get("content"), str)]
    parts = (part.strip() for text in said for part in _SENTENCE_END.split(text))
    return list(dict.fromkeys(p for p in parts if any(map(str.isalnum, p)) and not p.endswith(_QUESTION)))


def windows(lines: Sequence[str], room: int, count: Callable[[str], int]) -> Iterator[str]:
    """Lines joined into texts of at most ``room`` tokens; a longer line is cut, between words if it has any."""
    held: list[str] = []
    for piece in (piece for line in lines for piece in _pieces(line, room, count)):
        if held and count("\n".join([*held, piece])) > room:
            yield "\n".join(held)
            held = []
        held.append(piece)
    if held:
        yield "\n".join(held)


def _head(task: str, about: str, instructions: str) -> Prompt:
    head: Prompt = [{"role": "system", "content": "\n".join(filter(None, (task.format(about=about), instructions)))}]
    other = "user" if about == "assistant" else "assistant"
    for said, facts in _EXAMPLES:
        head.append({"role": "user", "content": said.format(about=about, other=other)})
        head.append({"role": "assistant", "content": json.dumps({"memory": [{"text": fact} for fact in facts]})})
    return head


def _pieces(line: str, room: int, count: Callable[[str], int]) -> list[str]:
    if len(line) < 2 or count(line) <= room:
        return [line]
    middle = line.rfind(" ", 0, len(line) // 2 + 1)
    cut = middle if middle > 0 else len(line) // 2
    return [*_pieces(line[:cut], room, count), *_pieces(line[cut:].lstrip() or " ", room, count)]
