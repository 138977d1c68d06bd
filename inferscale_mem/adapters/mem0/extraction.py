"""Facts out of conversations: what is asked of our own LLM, and how any LLM's reply is read.

Mem0 asks with a prompt of some 8,500 tokens, more than a small model can read, and takes a reply that it cannot parse
for "nothing to remember". Here the prompt is short, and a reply that cannot be read is an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from mem0.exceptions import LLMError
from mem0.llms.base import LLMBase
from mem0.memory.utils import remove_code_blocks

from inferscale_mem.adapters.mem0.errors import ExtractionError
from inferscale_mem.errors import FactError, InferScaleError, InputError
from inferscale_mem.types import Scope

logger = logging.getLogger(__name__)

_LIST_KEYS = ("memory", "memories", "facts")
_TEXT_KEYS = ("text", "memory", "fact", "content")


@dataclass(frozen=True)
class Extraction:
    """One conversation that facts are to be had from.

    Attributes:
        messages: new messages, roles and text.
        instructions: the app's own instructions, or "".
        about: whom the facts are about, "user" or "assistant".
        check: raises FactError for a text that cannot be stored.
        scope: whose conversation it is.
    """

    messages: Sequence[Mapping[str, Any]]
    instructions: str = ""
    about: str = "user"
    check: Callable[[str], None] = lambda text: None
    scope: Scope | None = None


_current: ContextVar[Extraction | None] = ContextVar("inferscale_extraction", default=None)


def current() -> Extraction | None:
    """The extraction that this thread or task is about, if Mem0's pipeline is running one."""
    return _current.get()


@contextlib.contextmanager
def extracting(extraction: Extraction) -> Iterator[None]:
    """Mem0's pipeline runs inside; contexts reach the threads that its async twin starts.

    Raises:
        ExtractionError: in place of Mem0's LLMError, where an error of this package is behind it.
        InputError: where bad input is.
    """
    token = _current.set(extraction)
    try:
        yield
    except LLMError as error:
        if isinstance(error.__cause__, ExtractionError | InputError):
            raise error.__cause__ from error.__cause__.__cause__
        if isinstance(error.__cause__, InferScaleError):
            raise ExtractionError(str(error)) from error.__cause__
        raise
    finally:
        _current.reset(token)


class CheckedLLM(LLMBase):  # type: ignore[misc]  # Mem0 ships no types
    """An app's own LLM; its extraction replies are read leniently, and never taken for "nothing" when unreadable."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config = inner.config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        """As the LLM inside.

        Raises:
            ExtractionError: facts were asked for, and the reply cannot be read.
        """
        reply = self.inner.generate_response(*args, **kwargs)
        extraction = current()
        return reply if extraction is None else json.dumps({"memory": read_reply(reply, extraction.check)})


def read_reply(reply: Any, check: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """The facts in an extraction reply, as Mem0's pipeline reads them: [{"text": ..., ...}].

    Takes lists and objects, texts and objects with a text, fences and chatter around the JSON, the facts before a
    truncation, and drops lone surrogates.

    Args:
        reply: text, or content blocks.
        check: raises FactError for a text that cannot be stored; such facts are left out, with a warning.

    Raises:
        ExtractionError: there may be facts, but none can be read.
    """
    text = remove_code_blocks(reply)
    found, whole = _items(text)
    facts = [fact for fact in map(_fact, found) if fact is not None]
    lost = len(found) - len(facts)
    for fact in list(facts):
        try:
            check(fact["text"])
        except FactError as error:
            logger.warning("A fact from the extraction LLM was left out: %s", error)
            facts.remove(fact)
            lost += 1
    if not facts and (lost or not whole):
        raise ExtractionError(
            f"The extraction LLM's reply holds no readable facts: {text[:200]!r}. Nothing was stored; use a model that "
            "answers in JSON, or add with infer=False."
        )
    if lost or not whole:
        logger.warning("Part of an extraction reply could not be read; %d facts were: %.200r", len(facts), text)
    return facts


def _items(text: str) -> tuple[list[Any], bool]:
    """What the reply lists, and whether all of the reply was understood."""
    decoder = json.JSONDecoder(strict=False)
    starts = [match.start() for match in re.finditer(r"[\[{]", text)]
    for start in starts:
        try:
            value, _ = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            continue
        # Behind chatter the reply may start late; but so does an item of a reply that was cut off.
        listed = _listed(value) if start == starts[0] or _lists_facts(value) else None
        if listed is not None:
            return listed, True
        break
    return _salvaged(text, decoder), False


def _lists_facts(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(key), list) for key in _LIST_KEYS)


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return None
    if not value:
        return []
    for key in _LIST_KEYS:
        if key in value:
            inner = value[key]
            return [] if inner is None else inner if isinstance(inner, list) else [inner]
    return None


def _salvaged(text: str, decoder: json.JSONDecoder) -> list[Any]:
    """The complete items of the first list in a truncated reply."""
    at = text.find("[") + 1
    items: list[Any] = []
    while at:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        try:
            item, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        items.append(item)
    return items


def _fact(item: Any) -> dict[str, Any] | None:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, dict):
        return None
    text = next((item[key] for key in _TEXT_KEYS if isinstance(item.get(key), str)), "")
    text = "".join(char for char in text if not "\ud800" <= char <= "\udfff").strip()
    return {**item, "text": text} if text else None
