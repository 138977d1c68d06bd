"""What several tests of the Mem0 adapter share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from inferscale_mem.types import PromptPlan, Sampling


def keeps(*words: str) -> Callable[[PromptPlan, Sampling], str]:
    """Answers of an extraction LLM that keeps the sentences with one of these words in them."""

    def answer(plan: PromptPlan, sampling: Sampling) -> str:
        assert sampling.json_schema is not None
        (sentence,) = sampling.json_schema["properties"]["memory"]["items"]["properties"]["text"]["enum"]
        said = any(re.search(rf"\b{word}\b", sentence) for word in words)
        return '{"memory": [{"text": "' if said else '{"memory": []}'

    return answer


def texts(results: dict[str, Any]) -> list[str]:
    """What results hold in place of memories, sorted."""
    return sorted(hit["memory"] for hit in results["results"])
