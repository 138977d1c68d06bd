"""What every engine promises, as tests: subclass ``EngineConformance`` in a test file, and pytest runs them.

    @pytest.fixture(scope="module")
    def engine():
        engine = MyEngine(..., key=scene.KEY)
        yield engine
        engine.close()

    @pytest.fixture
    def make_engine(engine):
        ...

    class TestMyEngine(EngineConformance):
        exact_tolerance = 1e-4

``engine`` is shared by all tests, so they do not depend on what it holds. ``make_engine(record_tokens=None,
connector=True)`` starts another one, with room for so many tokens of records, and closes it after the test if the test
did not. Engines are opened with ``scene.KEY``. Nothing here needs more than the protocol, nor a prompt of more than
some 300 tokens, save for one test that fills the model's context: keep ``max_model_len`` near 512 where time matters.
"""

from __future__ import annotations

from inferscale_mem.testing.conformance_answers import AnswerConformance
from inferscale_mem.testing.conformance_callers import CallerConformance
from inferscale_mem.testing.conformance_records import RecordConformance


class EngineConformance(RecordConformance, AnswerConformance, CallerConformance):
    """All of it.

    Attributes:
        exact_tolerance: largest difference of log-probs between plain prefill and records of the exact prefix.
        batch_tolerance: largest difference of log-probs between a request alone and one among others.
        computes: there is a model, so wrong records give other answers.
    """
