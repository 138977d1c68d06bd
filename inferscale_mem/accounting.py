"""What became of each handle of a request: injected, or missed for a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from inferscale_mem.types import InjectReport, Miss, PromptPlan, Segment

TEXT_TAIL = "left to the text tail"
NOT_INJECTED = "the engine did not inject it"

Why = Callable[[Segment, str, Mapping[str, str]], str]
"""(fact, its handle, handle -> what the engine said) -> why the fact was not injected."""


def account(plan: PromptPlan, report: InjectReport, why: Why) -> InjectReport:
    """The engine's report, with each handle of the request counted as injected or listed once as missed."""
    missed = {miss.handle: miss for miss in plan.missed}
    said = {miss.handle: miss.reason for miss in report.missed}
    left = report.facts_injected  # The first ones: the engine claims a run of leading segments.
    injected: set[str] = set()
    for fact in plan.facts:
        handle, asked = fact.handle, fact.asked or fact.handle
        if handle is None or asked is None or handle in injected or asked in missed:
            continue
        if fact.record is not None and handle not in said and left > 0:
            left -= 1
            injected.add(handle)
        else:
            missed[asked] = Miss(asked, why(fact, handle, said))
    return replace(
        report,
        facts_requested=len(injected) + len(missed),
        facts_injected=len(injected),
        missed=tuple(missed.values()),
    )


def why_not(fact: Segment, handle: str, said: Mapping[str, str]) -> str:
    """The reason, as far as plan and engine know it."""
    return TEXT_TAIL if fact.record is None else said.get(handle, NOT_INJECTED)
