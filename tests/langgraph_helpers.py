"""What tests of agents and of LangGraph stores share."""

from __future__ import annotations

from langchain_core.messages import HumanMessage

from inferscale_mem.testing import FakeEngine

QUESTION = {"messages": [HumanMessage("What may I not eat?")]}
PATIENCE = 20
"""Seconds until what is done in the background must be done."""


def prompt_of(engine: FakeEngine) -> str:
    """The latest prompt."""
    return engine.tokenizer.decode(engine.requests[-1][0].token_ids)
