"""For tests: an engine without a model, and the conformance suite that every engine passes.

    from inferscale_mem.testing import FakeEngine

    engine = FakeEngine(answers=["Peanuts."])

    from inferscale_mem.testing import EngineConformance

    class TestMyEngine(EngineConformance): ...  # and two fixtures, see conformance.py

Loads neither torch nor pytest.
"""

from __future__ import annotations

from inferscale_mem.testing.bytes_tokenizer import BytesTokenizer as BytesTokenizer
from inferscale_mem.testing.conformance import EngineConformance as EngineConformance
from inferscale_mem.testing.conformance_scores import ScorerConformance as ScorerConformance
from inferscale_mem.testing.fake_engine import FakeEngine as FakeEngine

__all__ = ["BytesTokenizer", "EngineConformance", "FakeEngine", "ScorerConformance"]
