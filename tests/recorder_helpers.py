"""A recorder on a fake engine and an index in memory, for tests."""

from __future__ import annotations

import itertools
from typing import Any

from gated_engine import PATIENCE, GatedEngine
from small_index import SmallIndex

from inferscale_mem.encoding import parse_policy
from inferscale_mem.handles import HandleSigner
from inferscale_mem.kv.directory import ABSENT
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.recording.owed import OwedDrops
from inferscale_mem.recording.recorder import Recorder
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import Fact, InjectReport, Miss, PromptPlan, Sampling, Scope, Segment

KEY = bytes(range(32))
ALICE, BOB = Scope(user_id="alice"), Scope(user_id="bob")
_numbers = itertools.count(1)


def new_fact(text: str = "", scope: Scope = ALICE, revision: str = "1") -> Fact:
    """A fact that is younger than all before it."""
    number = next(_numbers)
    made = f"2025-01-{1 + number // 1440 % 28:02}T{number // 60 % 24:02}:{number % 60:02}:00+00:00"
    return Fact(f"fact-{number}", text or f"Likes the number {number}.", scope, revision, made)


def forged(handle: str) -> str:
    """The handle with a wrong tag."""
    return handle[:-1] + ("0" if handle[-1] != "0" else "1")


class Recording:
    """Everything a recorder needs, and the recorder.

    Attributes:
        engine, index, signer, planner, recorder: the parts.
    """

    def __init__(self, policy: str = "fact_chain(8, previous)", *, info: Any = None, **engine: Any) -> None:
        self.fake = FakeEngine(key=KEY, **engine)
        self.engine = GatedEngine(self.fake, **(info or {}))
        self.signer = HandleSigner(KEY, "tests")
        self.index = SmallIndex(self.signer)
        self.planner = PromptPlanner(self.engine.tokenizer, "tests")
        self.recorder = self.new_recorder(policy)

    def new_recorder(
        self, policy: str = "fact_chain(8, previous)", backoff_s: float = 0.0, owed: OwedDrops | None = None
    ) -> Recorder:
        parts = (self.engine, self.index, self.signer, self.planner, parse_policy(policy))
        return Recorder(*parts, attempts=3, backoff_s=backoff_s, owed=owed)

    def close(self) -> None:
        self.engine.encodes.open()
        self.engine.drops.open()
        self.engine.dropped.open()
        self.recorder.close()
        self.fake.close()

    def handle(self, fact: Fact) -> str:
        return self.signer.mint(fact)

    def record(self, fact: Fact) -> str:
        return self.planner.record_id(self.handle(fact))

    def handles(self, *facts: Fact) -> list[str]:
        return [self.handle(fact) for fact in facts]

    def ready(self, *facts: Fact) -> list[bool]:
        return [self.recorder.is_ready(self.record(fact)) for fact in facts]

    def add(self, *facts: Fact) -> None:
        """Store and queue facts."""
        self.index.put(*facts)
        self.recorder.add(facts)

    def remove(self, *facts: Fact) -> None:
        """Delete facts, as an app does."""
        self.index.take(*facts)
        self.recorder.remove(facts)

    def settle(self) -> None:
        """Wait until the recorder has nothing to do."""
        assert self.recorder.wait(PATIENCE)

    def plan(self, *facts: Fact, header: bool = True) -> PromptPlan:
        """A request for facts, all as if they were ready."""
        lead = (self.planner.default_header(),) if header else ()
        segments = tuple(self.planner.fact_segment(fact.text, self.handle(fact)) for fact in facts)
        return PromptPlan((*lead, *segments, Segment("text", (65, 66, 67))), ALICE, self.signer.store)

    def ask(self, *facts: Fact) -> InjectReport:
        """Send a request for facts to the engine; its report, which the recorder has not seen."""
        plan = self.plan(*facts)
        *_, last = self.engine.generate(plan, Sampling(max_tokens=1, temperature=0.0))
        assert last.report is not None
        return last.report

    def held(self, *facts: Fact) -> list[bool]:
        """Whether the engine itself has records of facts."""
        absent = [{miss.handle for miss in self.ask(fact).missed if miss.reason == ABSENT} for fact in facts]
        return [self.handle(fact) not in handles for fact, handles in zip(facts, absent, strict=True)]


def report(missed: dict[str, str], injected: int = 0) -> InjectReport:
    return InjectReport(0, injected, 0, 1, tuple(Miss(handle, reason) for handle, reason in missed.items()))
