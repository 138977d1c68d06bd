"""The words of this package as frozen dataclasses. Ids, token ids and counts only: no tensors here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from uuid import UUID

from inferscale_mem.config import AUTO
from inferscale_mem.errors import ScopeError
from inferscale_mem.reading import PLAIN, Reading
from inferscale_mem.sampling import Sampling as Sampling

OWNER_FIELDS = ("user_id", "agent_id", "run_id")
"""What can own a fact, most telling first."""


def _owner_id(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise ScopeError(f"{name}={value!r} does not name an owner; give text or a number.")
    return str(value).strip()


@dataclass(frozen=True)
class Scope:
    """Who owns a fact: the ids it was added under. At least one is set."""

    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None

    def __post_init__(self) -> None:
        for name in OWNER_FIELDS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip() or value.strip() == "*"):
                raise ScopeError(f"{name}={value!r} does not name an owner; give a non-empty string other than '*'.")
        if not self.owners:
            raise ScopeError("No owner given; pass at least one of user_id, agent_id, run_id.")

    @property
    def owners(self) -> dict[str, str]:
        """The ids that are set, in the order of OWNER_FIELDS."""
        return {name: value for name in OWNER_FIELDS if (value := getattr(self, name)) is not None}

    @cached_property
    def key(self) -> str:
        """Canonical text of the scope: equal scopes have equal keys, and no two scopes share one."""
        return json.dumps(self.owners, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> Scope:
        """The scope named by the owner fields of a mapping, read as Mem0 reads them; other keys are ignored.

        Numbers and UUIDs become text, spaces around an id are dropped.

        Raises:
            ScopeError: none of the owner fields is set, or one is something else.
        """
        return cls(**{name: _owner_id(name, source[name]) for name in OWNER_FIELDS if source.get(name) is not None})

    def covers(self, other: Scope) -> bool:
        """Whether a fact of scope ``other`` may be shown to somebody asking as this scope.

        A request of {user: a} sees a's facts of every run; one of {user: a, run: 1} only those of run 1.
        """
        return all(getattr(other, name) == value for name, value in self.owners.items())

    @classmethod
    def shared(cls, scopes: Iterable[Scope]) -> Scope:
        """The widest scope that covers all of ``scopes``, where one owner stands behind all of them.

        The most telling field that any of them sets must be set, and equal, in all: facts of two users never share
        a scope, even under one agent.

        Raises:
            ScopeError: no scopes, or more than one owner.
        """
        every = list(scopes)
        lead = next((f for f in OWNER_FIELDS if any(getattr(s, f) is not None for s in every)), None)
        if lead is None or len({getattr(s, lead) for s in every}) != 1:
            raise ScopeError("Memories of more than one owner in one request; send them in separate requests.")
        common = {f: getattr(every[0], f) for f in OWNER_FIELDS if len({getattr(s, f) for s in every}) == 1}
        return cls(**common)


@dataclass(frozen=True)
class Fact:
    """One memory, at one revision. Durable: it lives in the vector store, and its record can always be made again.

    Attributes:
        id: the store's id; stays the same over revisions.
        text: what is remembered.
        scope: who owns it.
        revision: changes whenever text or metadata change.
        created_at: ISO 8601, or "" if unknown.
        metadata: the app's own fields.
    """

    id: str
    text: str
    scope: Scope
    revision: str
    created_at: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A run of a prompt's tokens that stands or falls together.

    Attributes:
        kind: "header" (exact, starts at position 0), "fact", or "text" (always prefilled).
        token_ids: its tokens; never tokenised together with a neighbour.
        record: id of the record that holds its KV, or None if it has to be prefilled.
        handle: the fact's lasting handle (facts only).
        asked: the handle by which the request asked for the fact, where it is another one.
    """

    kind: Literal["header", "fact", "text"]
    token_ids: tuple[int, ...]
    record: str | None = None
    handle: str | None = None
    asked: str | None = None


@dataclass(frozen=True)
class Miss:
    """A handle or record that was asked for and not injected, and why."""

    handle: str
    reason: str


@dataclass(frozen=True)
class PromptPlan:
    """One request: header, facts in serving order, the rest. Concatenated token ids are the exact prompt.

    Attributes:
        segments: in order of position. Those with a record may be injected, up to the first gap.
        scope: whose facts these are; None if there are none.
        store: the store the handles belong to; "" if there are none.
        missed: handles that did not even make it into the plan (unknown, forged, foreign, stale).
        reading: how the prompt has the answer begin.
    """

    segments: tuple[Segment, ...]
    scope: Scope | None = None
    store: str = ""
    missed: tuple[Miss, ...] = ()
    reading: Reading = PLAIN

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def facts(self) -> tuple[Segment, ...]:
        """The fact segments, in serving order."""
        return tuple(segment for segment in self.segments if segment.kind == "fact")


@dataclass(frozen=True)
class Span:
    """Part of an encode prompt whose KV is to be kept as a record: tokens ``start`` (included) to ``end`` (not).

    Attributes:
        record: id the record will have.
        handle: handle of the fact (None for header records, which belong to no one).
        scope: the fact's owner (None for header records).
    """

    record: str
    start: int
    end: int
    handle: str | None = None
    scope: Scope | None = None


@dataclass(frozen=True)
class EncodePlan:
    """One encode request.

    Attributes:
        segments: the whole prompt: context (injected where it has a record, else prefilled) and what is encoded.
        spans: what to keep; non-overlapping, ascending.
        scope: whose facts these are; None for a header.
        store: the store the handles belong to.
    """

    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    scope: Scope | None = None
    store: str = ""

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [token for segment in self.segments for token in segment.token_ids]


@dataclass(frozen=True)
class EncodeReport:
    """What an encode request did.

    Attributes:
        encoded: record ids kept.
        refused: record id -> reason, for those not kept.
        tokens_prefilled: tokens of the prompt that the engine computed.
        tokens_injected: tokens of context that came from records.
        based_on: ids of the context records really injected: what the new records have seen.
    """

    encoded: tuple[str, ...]
    refused: Mapping[str, str]
    tokens_prefilled: int
    tokens_injected: int
    based_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class InjectReport:
    """What happened to the memories of a request; ``response_metadata["inferscale"]`` is its ``as_dict``.

    Attributes:
        facts_requested: handles the request carried, good or bad.
        facts_injected: facts whose KV was written into the cache instead of being prefilled.
        tokens_injected: tokens of header and facts that came from records.
        tokens_prefilled: tokens of the prompt that were not injected: computed, or found in the prefix cache.
        missed: what was asked for and not injected, with reasons; those facts were prefilled as text unless the
            reason says the handle is not valid.
        ttft_ms: milliseconds from handing the request to the engine to its first token.
        tokens_cached: tokens of the prompt that the engine did not compute, since they were injected or in its prefix
            cache; None where the engine does not say. For measurements; not part of ``as_dict``.
    """

    facts_requested: int
    facts_injected: int
    tokens_injected: int
    tokens_prefilled: int
    missed: tuple[Miss, ...] = ()
    ttft_ms: float | None = None
    tokens_cached: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for response metadata."""
        return {
            "facts_requested": self.facts_requested,
            "facts_injected": self.facts_injected,
            "tokens_injected": self.tokens_injected,
            "tokens_prefilled": self.tokens_prefilled,
            "missed": [{"handle": miss.handle, "reason": miss.reason} for miss in self.missed],
            "ttft_ms": self.ttft_ms,
        }


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer as it is made.

    Attributes:
        index: which of the n answers it belongs to.
        text: new text.
        token_ids: new tokens.
        logprobs: per new token, token id -> log-probability; None unless asked for.
        finish_reason: "stop" or "length" on an answer's last chunk, else None.
        report: on a request's very last chunk, else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] | None = None
    finish_reason: str | None = None
    report: InjectReport | None = None


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is and can hold.

    Attributes:
        model: name or path.
        fingerprint: changes with anything that changes KV state: model, dtype, rope, engine kind.
        max_model_len: tokens of prompt and answer together.
        block_size: tokens per block of the paged cache (1 where there are no blocks).
        dtype: of weights and KV, e.g. "bfloat16".
        bytes_per_token: of a record, all layers.
        record_bytes: budget for records.
        connector: whether records can be made and injected at all.
        verifies_handles: whether the engine itself checks handles' tags.
        version: engine and its version, e.g. "vllm 0.32.0".
        device: what it runs on, as the system calls it.
        record_dtype: in which records are stored; see ``EngineConfig``.
        preamble: what facts are encoded behind in place of the header, its record being there from the start; None:
            behind the header itself.
    """

    model: str
    fingerprint: str
    max_model_len: int
    block_size: int
    dtype: str
    bytes_per_token: int
    record_bytes: int
    connector: bool
    verifies_handles: bool
    version: str
    device: str = "cpu"
    record_dtype: str = AUTO
    preamble: Segment | None = None


@dataclass(frozen=True)
class EngineStatus:
    """What an engine holds now, and what it has done since it started.

    Attributes:
        records: resident records, and ``tokens`` and ``bytes`` of them.
        counters: e.g. "encoded", "injected", "evicted", "missed", "dropped", "tokens_injected".
    """

    records: int
    tokens: int
    bytes: int
    counters: Mapping[str, int]


Message = Mapping[str, Any]
"""A chat message in the form chat templates take: {"role": …, "content": …, …}."""

Messages = Sequence[Message]
