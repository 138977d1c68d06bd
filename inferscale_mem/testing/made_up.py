"""What the fake engine answers where a model would have to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from inferscale_mem.errors import InputError
from inferscale_mem.testing.bytes_tokenizer import VOCAB_SIZE
from inferscale_mem.types import PromptPlan

SIMPLE: Mapping[str | None, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False, "null": None, None: None}
"""JSON type -> its simplest value."""


def logprobs(plan: PromptPlan, token: int, count: int | None) -> tuple[Mapping[int, float], ...] | None:
    """Half for the token, the other half spread over the vocabulary in a way that depends on the prompt."""
    if count is None:
        return None
    seed = hashlib.sha256(repr(plan.token_ids).encode()).digest()
    weights = [1 + seed[i % len(seed)] for i in range(VOCAB_SIZE)]
    weights[token] = sum(weights) - weights[token]
    total = sum(weights)
    scores = {i: math.log(weight / total) for i, weight in enumerate(weights)}
    best = sorted(scores, key=lambda i: -scores[i])[: VOCAB_SIZE if count < 0 else count]
    return ({i: scores[i] for i in dict.fromkeys([*best, token])},)


def example(schema: Mapping[str, Any]) -> str:
    """The JSON text of something small that fits a simple schema."""
    return json.dumps(_instance(schema))


def _instance(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return {name: _instance(properties.get(name, {})) for name in schema.get("required", properties)}
    if schema.get("type") == "array":
        return [_instance(schema.get("items", {}))] * schema.get("minItems", 0)
    if schema.get("type") not in SIMPLE:
        raise InputError(f"json_schema cannot be used: type {schema.get('type')!r} is not known to the fake engine.")
    return SIMPLE[schema.get("type")]
