"""Errors of this adapter that are of both trees: ours, and what Mem0 raises for the same thing."""

from __future__ import annotations

from typing import Any

from mem0.exceptions import LLMError
from mem0.exceptions import ValidationError as Mem0ValidationError

from inferscale_mem.errors import InferScaleError, InputError, ScopeError


class MissingOwnerError(ScopeError, Mem0ValidationError):  # type: ignore[misc]  # Mem0 ships no types
    """None of user_id, agent_id, run_id was given."""

    def __init__(self, message: str) -> None:
        Mem0ValidationError.__init__(
            self, message, error_code="VALIDATION_001", suggestion="Pass at least one of user_id, agent_id, run_id."
        )


class MessagesError(InputError, Mem0ValidationError):  # type: ignore[misc]  # Mem0 ships no types
    """The messages given to ``add`` are not of a kind that can be stored."""

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        Mem0ValidationError.__init__(
            self,
            message,
            error_code="VALIDATION_003",
            details=details,
            suggestion="Pass a string, a message, or a list of messages {'role': ..., 'content': ...}.",
        )


class ExtractionError(InferScaleError, LLMError):  # type: ignore[misc]  # Mem0 ships no types
    """No facts could be had from the extraction LLM: it failed, or its reply cannot be read. Nothing was stored."""

    def __init__(self, message: str) -> None:
        LLMError.__init__(self, message)
