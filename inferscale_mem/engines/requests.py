"""What an engine checks before it starts a request, and how it counts afterwards. No tensors here.

For engines that hold their directory in this process; in vLLM the connector's scheduler side does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferscale_mem.errors import InputError, PromptTooLongError
from inferscale_mem.kv.directory import DROPPED as DROPPED
from inferscale_mem.kv.directory import LAST, Directory, Record, Wanted
from inferscale_mem.types import EncodePlan, InjectReport, Miss, PromptPlan, Sampling, Segment

OFF = "the engine was started with connector=False"


@dataclass(frozen=True)
class Injection:
    """Records that are written into a request's cache: its first ``tokens`` tokens.

    Attributes:
        records: in order of position. Only the last one may be cut short by ``tokens``.
        tokens: how many.
        missed: records that were asked for and are not used.
    """

    records: tuple[Record, ...] = ()
    tokens: int = 0
    missed: tuple[Miss, ...] = ()

    @property
    def facts(self) -> int:
        """How many of the records belong to somebody: all but headers."""
        return sum(record.handle is not None for record in self.records)


def check_encode(plan: EncodePlan, max_model_len: int, vocab_size: int) -> None:
    """Refuse an encode plan that cannot be carried out.

    Raises:
        InputError: spans or tokens do not fit the prompt or the model.
    """
    prompt = plan.token_ids
    _check_tokens(prompt, vocab_size)
    if len(prompt) > max_model_len:
        raise InputError(
            f"An encode prompt of {len(prompt)} tokens does not fit the model's context of {max_model_len}; encode "
            "behind less context."
        )
    if not plan.spans:
        raise InputError("An encode plan without spans keeps nothing; name at least one span.")
    end = 0
    for span in plan.spans:
        if not end <= span.start < span.end <= len(prompt):
            raise InputError(
                f"Span {span.start}..{span.end} of {span.record!r} is empty, overlaps another, is out of order or "
                f"reaches beyond the prompt's {len(prompt)} tokens."
            )
        end = span.end


def check_generate(plan: PromptPlan, sampling: Sampling, max_model_len: int, vocab_size: int) -> int:
    """Refuse a request that cannot be answered; returns how many tokens its answer may have.

    Raises:
        PromptTooLongError: prompt and answer do not fit the model's context.
        InputError: tokens are not in the vocabulary, or sampling parameters contradict each other.
    """
    if sampling.prompt_logprobs is not None and (plan.facts or any(segment.record for segment in plan.segments)):
        raise InputError("prompt_logprobs need every prompt token computed; ask for them without memories.")
    return check_request(plan.token_ids, sampling, max_model_len, vocab_size)


def check_request(prompt: Sequence[int], sampling: Sampling, max_model_len: int, vocab_size: int) -> int:
    """The same for the tokens of a prompt, whatever stands in it."""
    _check_tokens(prompt, vocab_size)
    _check_sampling(sampling)
    room = max_model_len - len(prompt)
    asked = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
    if asked > room:
        raise PromptTooLongError(
            f"A prompt of {len(prompt)} tokens and an answer of {asked} do not fit the model's context of "
            f"{max_model_len}; shorten the prompt, send fewer memories, or lower max_tokens."
        )
    return sampling.max_tokens if sampling.max_tokens is not None else room


def check_score(plan: PromptPlan, answer: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    """Refuse an answer that cannot be scored.

    Raises:
        InputError: it is empty, or tokens are not in the vocabulary.
        PromptTooLongError: prompt and answer do not fit the model's context.
    """
    if not answer:
        raise InputError("An empty answer has no probability; give at least one token.")
    _check_tokens(answer, vocab_size)
    check_generate(plan, Sampling(max_tokens=len(answer)), max_model_len, vocab_size)


def find_context(directory: Directory, plan: EncodePlan) -> Injection:
    """Records of an encode plan's context that are at hand: leading segments that end before the first span."""
    limit = plan.spans[0].start
    context: list[Segment] = []
    length = 0
    for segment in plan.segments:
        length += len(segment.token_ids)
        if length > limit:
            break
        context.append(segment)
    match = directory.match(_wanted(context), plan.scope, plan.store)
    return Injection(match.records, match.length, match.missed)


def find_records(directory: Directory, plan: PromptPlan) -> Injection:
    """The longest run of a plan's leading segments that are at hand, without the prompt's last token."""
    match = directory.match(_wanted(plan.segments), plan.scope, plan.store)
    total = sum(len(segment.token_ids) for segment in plan.segments)
    if match.length < total:
        return Injection(match.records, match.length, match.missed)
    records, missed = list(match.records), list(match.missed)
    last = records[-1]
    if len(last.token_ids) == 1:
        records.pop()
        missed.append(Miss(last.handle or last.name, LAST))
    return Injection(tuple(records), total - 1, tuple(missed))


def without_connector(plan: PromptPlan) -> Injection:
    """Nothing injected, every record missed, because records are switched off."""
    return Injection(missed=tuple(Miss(s.handle or s.record, OFF) for s in plan.segments if s.record))


def count(directory: Directory, injection: Injection) -> None:
    """Add a request's injection to the directory's counters."""
    directory.counters["injected"] += injection.facts
    directory.counters["tokens_injected"] += injection.tokens
    directory.counters["missed"] += len(injection.missed)


def report(plan: PromptPlan, injection: Injection, ttft_ms: float | None) -> InjectReport:
    """What happened to the plan's memories, as far as the engine knows."""
    return InjectReport(
        facts_requested=len(plan.facts),
        facts_injected=injection.facts,
        tokens_injected=injection.tokens,
        tokens_prefilled=len(plan.token_ids) - injection.tokens,
        missed=injection.missed,
        ttft_ms=ttft_ms,
    )


def _wanted(segments: Sequence[Segment]) -> list[Wanted]:
    return [Wanted(segment.token_ids, segment.record, segment.handle) for segment in segments]


def _check_tokens(prompt: Sequence[int], vocab_size: int) -> None:
    if not prompt:
        raise InputError("The prompt is empty; give at least one token.")
    if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
        raise InputError(f"Token {wrong[0]} is not in the model's vocabulary of {vocab_size}.")


def _check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InputError(f"min_tokens={sampling.min_tokens} is more than max_tokens={sampling.max_tokens}.")
    if sampling.min_tokens and sampling.json_schema is not None:
        raise InputError("min_tokens and json_schema contradict each other: an answer ends where its JSON does.")
    if sampling.n > 1 and sampling.temperature == 0:
        raise InputError(f"n={sampling.n} answers at temperature 0 would all be the same; ask for one.")
