"""A memory service for an engine that has no memory: it knows no handle, and counts those it is given."""

from __future__ import annotations

import math
import secrets
import weakref

from inferscale_mem.config import EncodingConfig
from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import Engine
from inferscale_mem.service import MemoryService
from inferscale_mem.types import Fact, Scope

NO_MEMORY = "this chat model has no memory, so it knows no facts: make it with ChatInferScale(memory=…)"


class NoFacts:
    """A FactIndex without facts."""

    store = "none"

    def get(self, fact_id: str) -> Fact | None:
        """None."""
        return None

    def by_handle_id(self, handle_id: str) -> Fact | None:
        """None."""
        return None

    def facts(self, scope: Scope | None = None) -> list[Fact]:
        """Nothing."""
        return []

    def nearest(self, fact: Fact, m: int, below: float = math.inf) -> list[Fact]:
        """Nothing."""
        return []

    def previous(self, fact: Fact, m: int) -> list[Fact]:
        """Nothing."""
        return []

    def last_used(self, scope: Scope) -> float:
        """Never."""
        return 0.0

    def turns(self, fact: Fact, w: int) -> list[str]:
        """Nothing."""
        return []


class Detached:
    """Owns the service of an engine that was given without a memory; the service ends with its last user."""

    def __init__(self, engine: Engine) -> None:
        index = NoFacts()
        signer = HandleSigner(secrets.token_bytes(32), index.store)
        self.service = MemoryService(engine, index, signer, EncodingConfig(), unknown=NO_MEMORY)
        weakref.finalize(self, self.service.close)
