"""Mem0 LLM provider "inferscale": the engine that also serves the chat, with JSON-schema guided decoding."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mem0.configs.llms.base import BaseLlmConfig
from mem0.llms.base import LLMBase

from inferscale_mem.adapters.mem0.extraction import SCHEMA, Extraction, current, read_reply
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.engines import open_engine
from inferscale_mem.errors import ConfigError, PromptTooLongError
from inferscale_mem.handles import load_key
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.protocols import Engine
from inferscale_mem.types import PromptPlan, Sampling

REPLY_TOKENS = 1024
"""Most an extraction reply may take."""

_TASK = """You write down what should be remembered about the {about}. Read the conversation and list every lasting \
fact that the {about} states: names, people, places, dates, plans, tastes, health, work, belongings. One short, \
complete sentence per fact, in the {about}'s own words and language, with names instead of "it" or "there". Leave out \
questions, greetings, small talk and anything that was not said. If there is nothing to remember, the list is empty.
Answer in JSON: {{"memory": [{{"text": "..."}}]}}"""

_EXAMPLE = (
    {"role": "user", "content": "user: Hi! I moved to Lyon in May, and I can't stand olives.\nassistant: Noted!"},
    {
        "role": "assistant",
        "content": '{"memory": [{"text": "I moved to Lyon in May."}, {"text": "I can\'t stand olives."}]}',
    },
    {"role": "user", "content": "user: What's the weather like?\nassistant: Sunny."},
    {"role": "assistant", "content": '{"memory": []}'},
)


class EngineLLM(LLMBase):  # type: ignore[misc]  # Mem0 ships no types
    """Answers Mem0's requests on an engine of this package.

    Inside a memory of this package it uses that memory's engine. Anywhere else it opens one by the environment's
    settings when it is first needed.

    Args:
        config: Mem0's LLM settings; temperature, top_p, top_k and max_tokens count, the model is the engine's.
    """

    def __init__(self, config: BaseLlmConfig | dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self._engine: Callable[[], Engine] = _own_engine()
        self._planner: PromptPlanner | None = None

    def attach(self, engine: Callable[[], Engine]) -> None:
        """Use this engine; the function is called when it is first needed."""
        self._engine = engine

    def generate_response(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_format: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The model's answer.

        When Mem0 asks for facts, its prompt, which small models cannot hold, is replaced by a short one, and the answer
        is constrained to the schema that Mem0 reads.

        Raises:
            ConfigError: tools were given.
            PromptTooLongError: the messages do not fit the model's context.
            ExtractionError: facts were asked for, and the model's answer holds none that can be read.
        """
        extraction = current()
        if extraction is not None:
            return json.dumps({"memory": self._extract(extraction)})
        if tools:
            raise ConfigError("The LLM provider inferscale does not call tools; use another llm.provider for that.")
        sampling = Sampling(
            max_tokens=self._room(messages),
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            json_schema=_schema(response_format),
        )
        return self._answer(messages, sampling)

    def _extract(self, extraction: Extraction) -> list[dict[str, Any]]:
        sampling = Sampling(max_tokens=min(REPLY_TOKENS, self.config.max_tokens), temperature=0.0, json_schema=SCHEMA)
        facts: dict[str, dict[str, Any]] = {}
        for prompt in self._prompts(extraction, sampling.max_tokens or 0):
            for fact in read_reply(self._answer(prompt, sampling), extraction.check):
                facts.setdefault(fact["text"], fact)
        return list(facts.values())

    def _prompts(self, extraction: Extraction, reply: int) -> Iterator[list[Mapping[str, Any]]]:
        """One prompt per part of the conversation, each short enough for the model."""
        task = _TASK.format(about=extraction.about)
        if extraction.instructions:
            task = f"{task}\n{extraction.instructions}"
        head = [{"role": "system", "content": task}, *_EXAMPLE]
        room = self._engine().info.max_model_len - reply - self._count([*head, {"role": "user", "content": ""}])
        if room < 16:
            raise PromptTooLongError(
                "The model's context is too short for extracting facts; add with infer=False, or use another llm."
            )
        lines = [f"{m['role']}: {m['content']}" for m in extraction.messages if isinstance(m.get("content"), str)]
        for part in windows(lines, room - 8, self._tokens):
            yield [*head, {"role": "user", "content": part}]

    def _answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> str:
        return "".join(chunk.text for chunk in self._engine().generate(self._plan(messages), sampling))

    def _plan(self, messages: Sequence[Mapping[str, Any]]) -> PromptPlan:
        engine = self._engine()
        if self._planner is None:
            self._planner = PromptPlanner(engine.tokenizer, engine.info.fingerprint)
        plan = self._planner.plan(messages, {}, is_ready=lambda record: False, scope=None, store="")
        # An ordinary request: a record of this prompt's header would only take room from those of facts.
        return replace(plan, segments=tuple(replace(s, kind="text", record=None) for s in plan.segments), missed=())

    def _count(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return len(self._plan(messages).token_ids)

    def _tokens(self, text: str) -> int:
        return len(self._engine().tokenizer.encode(text, literal=True))

    def _room(self, messages: Sequence[Mapping[str, Any]]) -> int:
        free = self._engine().info.max_model_len - self._count(messages)
        if free < 1:
            raise PromptTooLongError("The messages do not fit the model's context; shorten them, or use another llm.")
        return min(int(self.config.max_tokens), free)


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


def _pieces(line: str, room: int, count: Callable[[str], int]) -> list[str]:
    if len(line) < 2 or count(line) <= room:
        return [line]
    middle = line.rfind(" ", 0, len(line) // 2 + 1)
    cut = middle if middle > 0 else len(line) // 2
    return [*_pieces(line[:cut], room, count), *_pieces(line[cut:].lstrip() or " ", room, count)]


def _schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kind = (response_format or {}).get("type")
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema: Mapping[str, Any] = (response_format or {})["json_schema"]["schema"]
        return schema
    return None


def _own_engine() -> Callable[[], Engine]:
    """Opens an engine on the first call, and returns it on all."""
    lock = threading.Lock()
    opened: list[Engine] = []

    def engine() -> Engine:
        with lock:
            if not opened:
                config = InferScaleConfig.from_env()
                opened.append(open_engine(config, load_key(config)))
            return opened[0]

    return engine
