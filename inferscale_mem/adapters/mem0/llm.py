"""Mem0 LLM provider "inferscale": the engine that also serves the chat, with JSON-schema guided decoding."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mem0.configs.llms.base import BaseLlmConfig
from mem0.llms.base import LLMBase

from inferscale_mem.adapters.mem0 import asking
from inferscale_mem.adapters.mem0.extraction import Extraction, current, read_reply
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.engines import open_engine
from inferscale_mem.errors import ConfigError, PromptTooLongError
from inferscale_mem.handles import load_key
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.protocols import Engine
from inferscale_mem.types import PromptPlan, Sampling

REPLY_TOKENS = 1024
"""Most an extraction reply may take."""

DECISION_TOKENS = 16
"""Enough to see whether a reply keeps a sentence."""

AT_ONCE = 8
"""Sentences that are decided about together: the engine batches them."""


class EngineLLMConfig(BaseLlmConfig):  # type: ignore[misc]  # Mem0 ships no types
    """Settings of the provider.

    Args:
        extraction: how facts are made of a conversation. "copy": the model decides about each sentence, and what is
            stored is what was said; safe with any model. "write": the model writes the facts itself, as Mem0 has it
            done; better with models of some 3 billion parameters and up, nonsense with small ones.
        settings: Mem0's own; temperature, top_p, top_k and max_tokens count.
    """

    def __init__(self, extraction: str = "copy", **settings: Any) -> None:
        super().__init__(**settings)
        if extraction not in ("copy", "write"):
            raise ConfigError(f"llm.config.extraction={extraction!r} is not known; use 'copy' or 'write'.")
        self.extraction = extraction


class EngineLLM(LLMBase):  # type: ignore[misc]  # Mem0 ships no types
    """Answers Mem0's requests on an engine of this package.

    Inside a memory of this package it uses that memory's engine. Anywhere else it opens one by the environment's
    settings when it is first needed.

    Args:
        config: see ``EngineLLMConfig``; the model is the engine's.
    """

    def __init__(self, config: EngineLLMConfig | None = None) -> None:
        super().__init__(EngineLLMConfig() if config is None else config)
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

        When Mem0 asks for facts, its prompt, which small models cannot hold, is replaced by short ones of our own, and
        the answer is constrained to the schema that Mem0 reads.

        Raises:
            ConfigError: tools were given.
            PromptTooLongError: the messages do not fit the model's context.
            FactError: a sentence to be kept is too long for a fact.
            ExtractionError: facts were asked for, and the model's answer holds none that can be read.
        """
        extraction = current()
        if extraction is not None:
            facts = self._copied(extraction) if self.config.extraction == "copy" else self._written(extraction)
            return json.dumps({"memory": facts})
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

    def _copied(self, extraction: Extraction) -> list[dict[str, Any]]:
        """The sentences that the model keeps."""

        def keeps(sentence: str) -> bool:
            prompt = asking.copy_prompt(sentence, extraction.about, extraction.instructions)
            schema = asking.schema([sentence])
            sampling = Sampling(max_tokens=DECISION_TOKENS, temperature=0.0, json_schema=schema)
            with contextlib.closing(self._stream(prompt, sampling)) as reply:
                return asking.kept(reply)

        said = asking.sentences(extraction.messages, extraction.about)
        for sentence in said:
            extraction.check(sentence)
        with ThreadPoolExecutor(AT_ONCE, "inferscale-extract") as pool:
            return [{"text": text} for text, keep in zip(said, pool.map(keeps, said), strict=True) if keep]

    def _written(self, extraction: Extraction) -> list[dict[str, Any]]:
        """The facts that the model writes."""
        reply = min(REPLY_TOKENS, int(self.config.max_tokens))
        sampling = Sampling(max_tokens=reply, temperature=0.0, json_schema=asking.schema())
        facts: dict[str, dict[str, Any]] = {}
        for prompt in self._parts(extraction, reply):
            for fact in read_reply(self._answer(prompt, sampling), extraction.check):
                facts.setdefault(fact["text"], fact)
        return list(facts.values())

    def _parts(self, extraction: Extraction, reply: int) -> Iterator[asking.Prompt]:
        """One prompt per part of the conversation, each short enough for the model."""
        about, instructions = extraction.about, extraction.instructions
        taken = len(self._plan(asking.write_prompt("", about, instructions)).token_ids) + reply + 8
        room = self._engine().info.max_model_len - taken
        if room < 16:
            raise PromptTooLongError(
                "The model's context is too short for writing facts; use llm.config.extraction='copy', or infer=False."
            )
        lines = [f"{m['role']}: {m['content']}" for m in extraction.messages if isinstance(m.get("content"), str)]
        count = self._engine().tokenizer.encode
        for part in asking.windows(lines, room, lambda text: len(count(text, literal=True))):
            yield asking.write_prompt(part, about, instructions)

    def _answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> str:
        return "".join(self._stream(messages, sampling))

    def _stream(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> Generator[str, None, None]:
        """An answer piece by piece; closing it ends the request."""
        chunks = self._engine().generate(self._plan(messages), sampling)
        try:
            for chunk in chunks:
                yield chunk.text
        finally:
            if isinstance(chunks, Generator):
                chunks.close()

    def _plan(self, messages: Sequence[Mapping[str, Any]]) -> PromptPlan:
        engine = self._engine()
        if self._planner is None:
            self._planner = PromptPlanner(engine.tokenizer, engine.info.fingerprint)
        plan = self._planner.plan(messages, {}, is_ready=lambda record: False, scope=None, store="")
        # An ordinary request: a record of this prompt's header would only take room from those of facts.
        return replace(plan, segments=tuple(replace(s, kind="text", record=None) for s in plan.segments), missed=())

    def _room(self, messages: Sequence[Mapping[str, Any]]) -> int:
        free = self._engine().info.max_model_len - len(self._plan(messages).token_ids)
        if free < 1:
            raise PromptTooLongError("The messages do not fit the model's context; shorten them, or use another llm.")
        return min(int(self.config.max_tokens), free)


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
