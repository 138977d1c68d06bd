"""What a fact is encoded behind. This decides how near injected answers come to those of plain text.

======================  ===============================================================================================
policy                  a fact's context
======================  ===============================================================================================
``alone``               nothing: it starts at position 0
``header``              the default prompt's header
``dialog_window(w)``    header and the last w dialog turns before the fact, each a list item as facts are. Deleting a
                        fact does not delete the turns, so records go on having seen what they said (decision 0030)
``fact_window(m)``      header and the owner's m most similar earlier facts, prefilled again
``fact_chain(m, how)``  header and the stored records of m earlier facts, injected: only the fact itself is computed.
                        how: ``nearest``, the most similar ones (the default), or ``previous``, the latest ones,
                        whatever they say
======================  ===============================================================================================

Of the similar ones, those that say almost the same as the new one are left out (``ALIKE``). The policy is part of every
record's fingerprint: changing it encodes all facts again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from inferscale_mem.errors import ConfigError, FactError
from inferscale_mem.prompt import PromptPlanner, ready_in_front
from inferscale_mem.protocols import FactIndex
from inferscale_mem.types import EncodePlan, Fact, Segment, Span

Kind = Literal["alone", "header", "dialog_window", "fact_window", "fact_chain"]
How = Literal["nearest", "previous"]

KNOWN = "alone, header, dialog_window(w), fact_window(m), fact_chain(m, nearest) and fact_chain(m, previous)"
MAX_CONTEXT = 256
ALIKE = 0.8
"""Cosine similarity from which an earlier fact says the same, as it were, and is no context: the model would copy from
it, and the record, served without it, would lack what the fact says (decision 0024)."""

_CALL = re.compile(r"\s*(?P<kind>\w+)\s*(?:\(\s*(?P<arguments>[^()]*?)\s*\)\s*)?")


@dataclass(frozen=True)
class Policy:
    """What facts are encoded behind.

    Attributes:
        kind: which context.
        size: at most so many turns or facts; 0 where there are none.
        how: which facts (fact_chain).
    """

    kind: Kind
    size: int = 0
    how: How = "nearest"

    @property
    def name(self) -> str:
        """Canonical text; ``parse_policy`` reads it."""
        if self.kind == "fact_chain":
            return f"fact_chain({self.size}, {self.how})"
        return f"{self.kind}({self.size})" if self.size else self.kind


def parse_policy(text: str) -> Policy:
    """The policy that a setting names; case and spaces do not matter.

    Raises:
        ConfigError: there is no such policy, or its parameters are wrong.
    """
    match = _CALL.fullmatch(text.lower()) if isinstance(text, str) else None
    kind: Kind | None = next((kind for kind in get_args(Kind) if match and kind == match["kind"]), None)
    if match is None or kind is None:
        raise ConfigError(f"encoding.policy={text!r} is not known; known are {KNOWN}.")
    arguments = [part.strip() for part in match["arguments"].split(",")] if match["arguments"] else []
    if kind in ("alone", "header"):
        if arguments:
            raise ConfigError(f"encoding.policy={text!r}: {kind} takes no parameters; write {kind}.")
        return Policy(kind)
    if kind == "fact_chain":
        return Policy(kind, _size(text, arguments, 2), _how(text, arguments[1:]))
    return Policy(kind, _size(text, arguments, 1))


def _size(text: str, arguments: Sequence[str], most: int) -> int:
    number = arguments[0] if 1 <= len(arguments) <= most else ""
    if not re.fullmatch(r"[0-9]{1,4}", number) or not 1 <= int(number) <= MAX_CONTEXT:
        raise ConfigError(
            f"encoding.policy={text!r} needs a number from 1 to {MAX_CONTEXT} in parentheses, as in "
            "fact_chain(8, nearest); to encode behind the header only, write header."
        )
    return int(number)


def _how(text: str, arguments: Sequence[str]) -> How:
    how: How | None = next((how for how in get_args(How) if list(arguments) == [how]), None)
    if how is None and arguments:
        raise ConfigError(f"encoding.policy={text!r}: facts are chosen by nearest or previous, not {arguments[0]!r}.")
    return how or "nearest"


def encode_plan(
    policy: Policy,
    fact: Fact,
    handle: str,
    index: FactIndex,
    planner: PromptPlanner,
    mint: Callable[[Fact], str],
    *,
    max_tokens: int | None = None,
    is_ready: Callable[[str], bool] | None = None,
    preamble: Segment | None = None,
) -> EncodePlan:
    """The encode request of one fact: header, context (most telling last), the fact, whose span is kept.

    Args:
        policy: which context.
        fact: what to encode.
        handle: its handle.
        index: knows the context.
        planner: tokenises, and makes the header.
        mint: makes a fact's handle.
        max_tokens: the engine's limit for prompts; context that does not fit is left out, the least telling first.
        is_ready: whether a record can be injected now. If given, context without one goes behind the others, since
            the engine has to prefill whatever follows it.
        preamble: stands in the header's place.

    Raises:
        FactError: header and fact alone do not fit.
        ChatTemplateError: the model has no usable chat template.
    """
    own = planner.fact_segment(fact.text, handle)
    header = [] if policy.kind == "alone" else [preamble or planner.default_header()]
    room = None if max_tokens is None else max_tokens - sum(len(segment.token_ids) for segment in [*header, own])
    if room is not None and room < 0:
        raise FactError(
            f"The fact has {len(own.token_ids)} tokens; with the prompt's header that is {-room} more than the "
            f"{max_tokens} the model takes. Split it into several facts."
        )
    context = _fitting(_context(policy, fact, index, planner, mint), room)[::-1]
    segments = (*header, *(ready_in_front(context, is_ready) if is_ready else context), own)
    end = sum(len(segment.token_ids) for segment in segments)
    span = Span(planner.record_id(handle), end - len(own.token_ids), end, handle, fact.scope)
    return EncodePlan(segments, (span,), fact.scope, store=index.store)


def _context(
    policy: Policy, fact: Fact, index: FactIndex, planner: PromptPlanner, mint: Callable[[Fact], str]
) -> list[Segment]:
    """Segments of the context, most telling first."""
    if policy.kind == "dialog_window":
        turns = index.turns(fact, policy.size)
        return [Segment("text", planner.fact_tokens(turn)) for turn in reversed(turns)]
    if policy.kind in ("fact_window", "fact_chain"):
        previous = policy.how == "previous"
        earlier = index.previous(fact, policy.size) if previous else index.nearest(fact, policy.size, ALIKE)
        chained = policy.kind == "fact_chain"
        return [planner.fact_segment(f.text, mint(f), record=chained) for f in earlier]
    return []


def _fitting(context: Sequence[Segment], room: int | None) -> list[Segment]:
    """What fits into ``room`` tokens, most telling first."""
    fitting: list[Segment] = []
    left = room
    for segment in context:
        if left is None or len(segment.token_ids) <= left:
            fitting.append(segment)
            left = None if left is None else left - len(segment.token_ids)
    return fitting
