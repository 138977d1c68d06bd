"""How to sample an answer, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from inferscale_mem.errors import InputError
from inferscale_mem.json_limits import LONG, check_json

_COUNT = (1 << 31) - 1
_LEAST = 1e-9  # above nothing

LIMITS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, _COUNT),
    "min_tokens": (0, _COUNT),
    "temperature": (0, inf),
    "top_p": (_LEAST, 1),
    "top_k": (-1, _COUNT),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (_LEAST, inf),
    "seed": (-LONG, LONG - 1),
    "n": (1, _COUNT),
    "logprobs": (-1, _COUNT),
    "prompt_logprobs": (-1, _COUNT),
}
"""What numbers may be, both ends included."""

WHOLE = frozenset({"max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"})
FLAGS = ("ignore_eos", "skip_special_tokens", "detokenize")
_NEEDED = ("min_tokens", "n")


@dataclass(frozen=True)
class Sampling:
    """How to sample an answer. None means: as the model's generation config says, else the engine's default.

    Raises:
        InputError: a value of the wrong kind, or out of range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """Top log-probs to return per token; -1 for the whole vocabulary."""
    prompt_logprobs: int | None = None
    """Needs the prompt's own logits, which injected tokens do not have; engines refuse it together with facts."""
    json_schema: Mapping[str, Any] | None = None
    """Constrain the answer to this JSON schema."""
    skip_special_tokens: bool = True
    """False: special tokens are part of the answer's text, but for the one that ends it."""
    detokenize: bool = True
    """False: the answer's text is not wanted, and may be left empty; saves time with log-probs of many tokens."""

    def __post_init__(self) -> None:
        # Checked here, whoever makes one: an engine may die of a value that it cannot decode.
        for name, (lowest, highest) in LIMITS.items():
            value = getattr(self, name)
            if value is None and name not in _NEEDED:
                continue
            whole = name in WHOLE
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not isfinite(value):
                raise InputError(f"{name}={value!r} must be a {'whole ' if whole else ''}number.")
            if not lowest <= value <= highest:
                raise InputError(f"{name}={value!r} is out of range; it must be from {lowest:g} to {highest:g}.")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r} must be True or False.")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise InputError(f"stop={self.stop!r}: stop strings must be strings and not empty.")
        check_json(self.stop, "stop")
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise InputError(f"json_schema={self.json_schema!r} must be a JSON schema: an object.")
        check_json(self.json_schema, "json_schema")
