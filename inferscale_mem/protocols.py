"""What the parts expect of each other: engines below, adapters above, and nothing imported in between."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from inferscale_mem.remote import Announced, Announcement
from inferscale_mem.types import (
    Chunk,
    EncodePlan,
    EncodeReport,
    EngineInfo,
    EngineStatus,
    Fact,
    InjectReport,
    Messages,
    PromptPlan,
    Sampling,
    Scope,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ChatTokenizer(Protocol):
    """The model's tokenizer and chat template."""

    def encode(self, text: str, *, literal: bool) -> list[int]:
        """Token ids of ``text``, nothing added. ``literal``: spellings of special tokens are ordinary characters."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, special tokens left out unless told otherwise."""
        ...

    def render(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat template's text for these messages, ending where the answer starts.

        Raises:
            ChatTemplateError: the model has no template, or it refuses these messages.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """A model that answers prompts, keeps KV records and injects them.

    Thread-safe; each pair of methods does the same, blocking and not. The async ones run on any event loop.
    One conformance suite (``inferscale_mem.testing``) holds all implementations to this.
    """

    @property
    def info(self) -> EngineInfo:
        """What this engine is and can hold."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer and chat template."""
        ...

    def encode(self, plan: EncodePlan) -> EncodeReport:
        """Prefill the plan's prompt on top of its context's records, and keep its spans as records.

        A span whose record exists already is replaced. Returns when the records can be injected.

        Raises:
            InputError: spans or tokens do not fit the prompt or the model.
            EngineClosedError: after close().
        """
        ...

    async def aencode(self, plan: EncodePlan) -> EncodeReport:
        """As encode."""
        ...

    def generate(self, plan: PromptPlan, sampling: Sampling) -> Iterator[Chunk]:
        """Answer the plan's prompt, injecting the longest run of leading segments whose records are at hand.

        Closing the iterator early aborts the request. The last chunk carries the report.

        Raises:
            PromptTooLongError: nothing was started.
            EngineClosedError: after close().
        """
        ...

    def agenerate(self, plan: PromptPlan, sampling: Sampling) -> AsyncIterator[Chunk]:
        """As generate."""
        ...

    def drop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        """Forget every record of these handles, wherever its bytes lie, those being encoded included.

        Args:
            handles: whose records go.
            alive: those of them whose facts are still there. What the others stand for is forgotten too, for good,
                where others than this process make prompts.
        """
        ...

    async def adrop(self, handles: Sequence[str], alive: Collection[str] = ()) -> None:
        """As drop."""
        ...

    def announce(self, announcement: Announcement) -> Announced:
        """Tell what handles stand for, where others than this process make prompts; no effect elsewhere.

        What was dropped as gone stays unknown, whenever it is announced, unless the announcer knew of that drop.
        """
        ...

    def status(self) -> EngineStatus:
        """What it holds now."""
        ...

    def close(self) -> None:
        """Release everything; safe to call twice."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """What an engine can do beside answering: say how likely a given answer is. Evaluation needs it, apps do not.

    A conformance suite of its own (``inferscale_mem.testing.ScorerConformance``) holds implementations to this.
    """

    def score(self, plan: PromptPlan, answer: Sequence[int]) -> tuple[NDArray[np.float32], InjectReport]:
        """Log-probabilities of every token of the vocabulary, at each place of an answer that is given.

        Memories are injected as for ``Engine.generate``.

        Args:
            plan: of the prompt.
            answer: token ids.

        Returns:
            Natural logarithms [len(answer), vocabulary] float32, row i given the prompt and ``answer[:i]``; and what
            was injected.

        Raises:
            InputError: the answer is empty, or its tokens are not in the vocabulary.
            PromptTooLongError: prompt and answer do not fit the model's context.
            EngineClosedError: after close().
        """
        ...


class FactIndex(Protocol):
    """The durable facts of one store, as the recorder and the chat model need them. Thread-safe."""

    @property
    def store(self) -> str:
        """Name of the store, as it goes into handles' tags."""
        ...

    def get(self, fact_id: str) -> Fact | None:
        """The fact at its latest revision; None if it is gone or expired."""
        ...

    def by_handle_id(self, handle_id: str) -> Fact | None:
        """The live fact whose latest revision has this handle id."""
        ...

    def facts(self, scope: Scope | None = None) -> list[Fact]:
        """All live facts the scope covers, oldest first; of every owner if None."""
        ...

    def nearest(self, fact: Fact, m: int, below: float = math.inf) -> list[Fact]:
        """Up to m facts of exactly the same scope, older than ``fact`` and most similar to it, most similar first.

        Those that say the same, as it were, are left out: their cosine similarity to ``fact`` is not ``below`` this.
        But never more of them than m, or half of the scope's facts: an embedder may find everything similar.
        """
        ...

    def previous(self, fact: Fact, m: int) -> list[Fact]:
        """Up to m facts of exactly the same scope, older than ``fact``, newest first."""
        ...

    def last_used(self, scope: Scope) -> float:
        """When facts of exactly this scope were last added or asked for, in seconds since 1970; 0 if unknown."""
        ...

    def turns(self, fact: Fact, w: int) -> list[str]:
        """Up to w dialog turns of the fact's own run, said before or when it was added, oldest first."""
        ...
