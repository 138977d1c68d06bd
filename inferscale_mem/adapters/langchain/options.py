"""What a call may set: sampling, tools, memories and scope, from the model's own fields and the call's keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from inferscale_mem.adapters.langchain.tools import NO_TOOLS, Calling, read_calling, read_response_format
from inferscale_mem.errors import InputError
from inferscale_mem.memories import read_memories
from inferscale_mem.prompt import Position
from inferscale_mem.reading import Reading
from inferscale_mem.types import OWNER_FIELDS, Sampling, Scope

SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "n",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
)
PLACING_FIELDS = ("memory_position", "human_handles")
CALL_OPTIONS = (
    *SAMPLING_FIELDS,
    *("memories", "scope", *OWNER_FIELDS, *PLACING_FIELDS),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("model", "stream"),
)
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "stop_sequences": "stop",
    "model_name": "model",
    "request_timeout": "timeout",
    "openai_api_key": "api_key",
    "openai_api_base": "base_url",
}
"""What other providers' chat models call some options, and the names that these have here."""


@dataclass(frozen=True)
class Options:
    """All a call has set, checked."""

    sampling: Sampling
    memories: tuple[str, ...]
    scope: Scope | None
    calling: Calling = NO_TOOLS
    position: Position = "system"
    human_handles: bool = False

    def sampling_for(self, reading: Reading) -> Sampling:
        """How to sample behind a prompt that is to be read so: a tool call that was begun must be one."""
        schema = self.calling.schema(reading) or self.sampling.json_schema
        special = reading.form == "mistral" and self.calling.call is None  # [TOOL_CALLS] is a special token
        return replace(self.sampling, json_schema=schema, skip_special_tokens=not special)


def read_options(defaults: Mapping[str, Any], call: Mapping[str, Any], models: Sequence[str | None]) -> Options:
    """The call's keywords over the model's own fields; None in a call means: as the model has it.

    Raises:
        InputError: a keyword nobody knows, a value out of range, or another model than the one that runs.
        ScopeError: an owner that names nobody.
        HandleError: ``memories`` holds something that is no handle.
    """
    call = own_names(call)
    unknown = sorted(set(call) - set(CALL_OPTIONS))
    if unknown:
        raise InputError(f"{unknown[0]!r} is not an option of a call; known are: {', '.join(CALL_OPTIONS)}.")
    if call.get("model") not in (None, *models):
        raise InputError(f"This engine runs {models[0]!r}; open another engine to ask {call['model']!r}.")
    sampling = read_sampling({**defaults, **{name: value for name, value in call.items() if value is not None}})
    calling = read_calling(call.get("tools"), call.get("tool_choice"))
    schema = read_response_format(call.get("response_format"))
    if schema is not None and calling.call is not None:
        raise InputError("response_format and a forced tool call contradict each other; ask for one of them.")
    return Options(
        replace(sampling, json_schema=schema),
        read_memories(call.get("memories")),
        read_scope(call) or read_scope(defaults),
        calling,
        **_read_placing({**defaults, **{name: value for name, value in call.items() if value is not None}}),
    )


def own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with every option under the name that it has here.

    Raises:
        InputError: one option under two names, with different values.
    """
    told = dict(values)
    for other, name in OTHER_NAMES.items():
        value = told.pop(other, None)
        if value is not None and told.get(name) not in (None, value):
            raise InputError(f"{name}={told[name]!r} and {other}={value!r}: give one of them.")
        if value is not None:
            told[name] = value
    return told


def _read_placing(values: Mapping[str, Any]) -> dict[str, Any]:
    position, human = values.get("memory_position", "system"), values.get("human_handles", False)
    if position not in get_args(Position):
        raise InputError(
            f"memory_position={position!r} is not known; use {' or '.join(map(repr, get_args(Position)))}."
        )
    if not isinstance(human, bool):
        raise InputError(f"human_handles={human!r} must be True or False.")
    return {"position": position, "human_handles": human}


def read_sampling(values: Mapping[str, Any]) -> Sampling:
    """Sampling as the engine takes it; keys that have nothing to do with sampling are ignored.

    Raises:
        InputError: a value of the wrong kind or out of range.
    """
    given = {name: values[name] for name in SAMPLING_FIELDS if values.get(name) is not None}
    wanted, top = given.pop("logprobs", None), given.pop("top_logprobs", None)
    given["logprobs"] = read_logprobs(wanted, top)
    given["stop"] = read_stop(given.get("stop"))
    return Sampling(**given)


def read_logprobs(wanted: bool | int | None, top: int | None) -> int | None:
    """How many log-probs a token; ``logprobs=True, top_logprobs=5`` is 5, as ``logprobs=5``. 0: only the chosen one's.

    Raises:
        InputError: ``top_logprobs`` without ``logprobs``, or a count below -1.
    """
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < -1):
        raise InputError(f"top_logprobs={top!r} must be a whole number: how many a token, -1 for the whole vocabulary.")
    if wanted is None or wanted is False:
        if top is not None:
            raise InputError("top_logprobs needs logprobs=True.")
        return None
    if wanted is True:
        return top or 0
    if not isinstance(wanted, int) or wanted < -1:
        raise InputError(f"logprobs={wanted!r}: give True, or how many a token (-1 for the whole vocabulary).")
    return wanted


def read_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings; one may come alone.

    Raises:
        InputError: an empty stop string, or something that is no string.
    """
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(text, str) or not text for text in found):
        raise InputError(f"stop={stop!r}: stop strings must be strings and not empty.")
    return found


def read_scope(values: Mapping[str, Any]) -> Scope | None:
    """The owner named by ``scope`` (a mapping or a Scope), or by ``user_id``, ``agent_id``, ``run_id``.

    Raises:
        ScopeError: names nobody. InputError: both ways at once, or a scope of the wrong kind.
    """
    scope = values.get("scope")
    owners = {name: values[name] for name in OWNER_FIELDS if values.get(name) is not None}
    if scope is None:
        return Scope.of(owners) if owners else None
    if owners:
        raise InputError(f"Both scope= and {next(iter(owners))}= are given; give one of them.")
    if isinstance(scope, Scope):
        return scope
    if not isinstance(scope, Mapping):
        raise InputError(f"scope={scope!r} must be a mapping with user_id, agent_id or run_id.")
    unknown = sorted(str(name) for name in scope if name not in OWNER_FIELDS)
    if unknown:
        raise InputError(f"scope has no {unknown[0]!r}; it takes user_id, agent_id and run_id.")
    return Scope.of(scope)
