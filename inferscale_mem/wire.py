"""Plans as they travel: ``kv_transfer_params["inferscale"]`` of an ordinary request, and the connector's answer.

Token ids travel once, as the request's own prompt; a segment says only how many of them are its own. Anybody who can
reach an engine can send orders, so each is signed with the handle key, together with the prompt it is about.
"""

from __future__ import annotations

import hmac
import json
import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from inferscale_mem.errors import InputError
from inferscale_mem.types import EncodePlan, EncodeReport, InjectReport, Miss, PromptPlan, Scope, Segment, Span

KEY = "inferscale"
VERSION = 1
NO_CONNECTOR = "the engine runs without the memory connector"
"""Reason given for every memory of a request that no connector has seen."""

UNSIGNED = "the order is not signed with this engine's handle key"

Op = Literal["inject", "encode", "probe", "drop", "status", "report"]
OPS: tuple[Op, ...] = ("inject", "encode", "probe", "drop", "status", "report")


@dataclass(frozen=True)
class WireSegment:
    """A segment without its tokens: the next ``length`` tokens of the prompt."""

    length: int
    record: str | None
    handle: str | None


@dataclass(frozen=True)
class Order:
    """What a request asks of the connector.

    Attributes:
        op: what to do.
        segments: of the prompt.
        spans: of it that become records.
        scope: whose memories it may read.
        store: that they belong to.
        handles: to forget.
        ticket: name under which the answer can be asked for; empty: it cannot.
    """

    op: Op
    segments: tuple[WireSegment, ...] = ()
    spans: tuple[Span, ...] = ()
    scope: Scope | None = None
    store: str = ""
    handles: tuple[str, ...] = ()
    ticket: str = ""


# Plans to parameters.


def inject_params(plan: PromptPlan, ticket: str = "") -> dict[str, Any]:
    """Parameters of a request that answers a plan.

    Args:
        plan: the prompt.
        ticket: unguessable; ``report_params`` asks with it for the connector's answer, should that not come by itself.
    """
    named = {"ticket": ticket} if ticket else {}
    return _params("inject", segments=_segments(plan.segments), scope=plan.scope, store=plan.store, **named)


def encode_params(plan: EncodePlan, op: Op = "encode") -> dict[str, Any]:
    """Parameters of a request that makes records (``op="probe"``: and checks that they do not depend on position)."""
    spans = [
        {
            "record": span.record,
            "start": span.start,
            "end": span.end,
            "handle": span.handle,
            "scope": span.scope.owners if span.scope else None,
        }
        for span in plan.spans
    ]
    return _params(op, segments=_segments(plan.segments), spans=spans, scope=plan.scope, store=plan.store)


def drop_params(handles: Sequence[str], alive: Collection[str] = ()) -> dict[str, Any]:
    """Parameters of a request that makes the engine forget records; ``alive``: of these the facts are still there."""
    return _params("drop", handles=list(handles), alive=[handle for handle in handles if handle in alive])


def report_params(ticket: str) -> dict[str, Any]:
    """Parameters of a request that asks for the answer to an earlier one, which was aborted."""
    return _params("report", ticket=ticket)


def new_ticket() -> str:
    """A name for one request's answer."""
    return secrets.token_hex(16)


def status_params() -> dict[str, Any]:
    """Parameters of a request that asks what the engine holds."""
    return _params("status")


def _params(op: Op, scope: Scope | None = None, **rest: Any) -> dict[str, Any]:
    return {KEY: {"v": VERSION, "op": op, "scope": scope.owners if scope else None, **rest}}


def _segments(segments: Sequence[Segment]) -> list[list[Any]]:
    return [[len(s.token_ids), s.record, s.handle] for s in segments if s.token_ids]


# Signatures.


def sign(params: Mapping[str, Any], token_ids: Sequence[int], key: bytes | None) -> dict[str, Any]:
    """The same parameters, signed together with the prompt they go with; unchanged without a key or an order."""
    if key is None or KEY not in params:
        return dict(params)
    order = params[KEY]
    return {**params, KEY: {**order, "signature": _signature(order, token_ids, key)}}


def is_signed(params: Mapping[str, Any], token_ids: Sequence[int], key: bytes) -> bool:
    """Whether the order was signed with this key, for this prompt. Never raises, whatever the parameters are."""
    order = params.get(KEY)
    if not isinstance(order, Mapping):
        return False
    given = order.get("signature")
    if not isinstance(given, str) or not given.isascii():
        return False
    try:
        right = _signature({name: value for name, value in order.items() if name != "signature"}, token_ids, key)
    except (TypeError, ValueError, OverflowError, RecursionError):  # what nobody can have signed
        return False
    return hmac.compare_digest(given, right)


def _signature(order: Mapping[str, Any], token_ids: Sequence[int], key: bytes) -> str:
    said = json.dumps(order, sort_keys=True, separators=(",", ":")).encode("ascii")
    return hmac.digest(key, b"inferscale order\0" + said + b"\0" + array("q", token_ids).tobytes(), "sha256").hex()


# Parameters to orders.


def parse(params: Mapping[str, Any] | None, num_tokens: int) -> Order | None:
    """The order in a request's ``kv_transfer_params``; None if it carries none.

    Args:
        params: as the engine received them; may come from anybody.
        num_tokens: length of the prompt they are about.

    Raises:
        InputError: malformed, of another version, or about other tokens.
    """
    if not isinstance(params, Mapping) or KEY not in params:
        return None
    given = params[KEY]
    try:
        return _order(given, num_tokens)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"kv_transfer_params[{KEY!r}] cannot be read: {error}") from error


def _order(given: Mapping[str, Any], num_tokens: int) -> Order:
    if given["v"] != VERSION:
        raise InputError(f"version {given['v']!r} of the protocol; this engine speaks {VERSION}")
    if given["op"] not in OPS:
        raise InputError(f"op {given['op']!r} is not one of {', '.join(OPS)}")
    parts = given.get("segments") or ()
    segments = tuple(WireSegment(_count(n), _name(record), _name(handle)) for n, record, handle in parts)
    if sum(segment.length for segment in segments) > num_tokens:
        raise InputError("segments are longer than the prompt")
    spans = tuple(_span(span) for span in given.get("spans") or ())
    edges = [edge for span in spans for edge in (span.start, span.end)]
    if edges != sorted(edges) or any(span.start >= span.end for span in spans) or (edges and edges[-1] > num_tokens):
        raise InputError("spans overlap, are empty, or reach beyond the prompt")
    scope = Scope.of(given["scope"]) if given.get("scope") else None
    handles = tuple(str(handle) for handle in given.get("handles") or ())
    return Order(
        cast(Op, given["op"]),
        segments,
        spans,
        scope,
        str(given.get("store") or ""),
        handles,
        str(given.get("ticket") or ""),
    )


def _span(span: Mapping[str, Any]) -> Span:
    scope = Scope.of(span["scope"]) if span.get("scope") else None
    return Span(str(span["record"]), _count(span["start"]), _count(span["end"]), _name(span.get("handle")), scope)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{value!r} is not a number of tokens")
    return value


def _name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InputError(f"{value!r} is not a name")
    return value


# Answers.


def missed_to_wire(missed: Sequence[Miss]) -> list[list[str]]:
    """Misses as they travel."""
    return [[miss.handle, miss.reason] for miss in missed]


def read_answer(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The connector's part of a finished request's ``kv_transfer_params``; None if no connector answered."""
    answer = (params or {}).get(KEY)
    return answer if isinstance(answer, Mapping) else None


def inject_report(plan: PromptPlan, answer: Mapping[str, Any] | None, ttft_ms: float | None) -> InjectReport:
    """What happened to a plan, from the connector's answer.

    Args:
        plan: what was asked.
        answer: from ``read_answer``; None means that no connector saw the request.
        ttft_ms: milliseconds to the first token.
    """
    total = sum(len(segment.token_ids) for segment in plan.segments)
    facts = plan.facts
    if answer is None or "error" in answer:
        reason = NO_CONNECTOR if answer is None else str(answer["error"])
        missed = tuple(Miss(fact.handle or "", reason) for fact in facts if fact.record)
        return InjectReport(len(facts), 0, 0, total, missed, ttft_ms)
    injected = int(answer.get("tokens_injected", 0))
    missed = tuple(Miss(str(handle), str(reason)) for handle, reason in answer.get("missed", ()))
    return InjectReport(len(facts), int(answer.get("facts_injected", 0)), injected, total - injected, missed, ttft_ms)


def encode_report(plan: EncodePlan, answer: Mapping[str, Any] | None) -> EncodeReport:
    """What became of an encode plan, from the connector's answer."""
    total = sum(len(segment.token_ids) for segment in plan.segments)
    if answer is None or "error" in answer:
        reason = NO_CONNECTOR if answer is None else str(answer["error"])
        return EncodeReport((), {span.record: reason for span in plan.spans}, total, 0)
    injected = int(answer.get("tokens_injected", 0))
    return EncodeReport(
        encoded=tuple(answer.get("encoded", ())),
        refused=dict(answer.get("refused", {})),
        tokens_prefilled=total - injected,
        tokens_injected=injected,
        based_on=tuple(answer.get("based_on", ())),
    )
