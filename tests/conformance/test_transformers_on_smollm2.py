"""The parts of the suite in which a real model could differ from a tiny random one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.protocols import Engine
from inferscale_mem.testing import EngineConformance
from inferscale_mem.testing.scene import KEY


@pytest.fixture(scope="module")
def engine(smollm2_path: str) -> Iterator[Engine]:
    config = EngineConfig(kind="transformers", dtype="float32", record_bytes=64 << 20, max_model_len=512)
    engine = TransformersEngine(smollm2_path, config, KEY)
    yield engine
    engine.close()


class TestOnSmolLM2:
    exact_tolerance = 1e-3
    computes = True

    test_exact = EngineConformance.test_records_of_the_exact_prefix_answer_like_plain_prefill
    test_chained = EngineConformance.test_facts_encoded_on_records_of_those_before_them
    test_unaffected = EngineConformance.test_plain_text_after_an_injected_request_is_unaffected
    test_control_tokens = EngineConformance.test_control_tokens_are_ordinary_characters_in_text_of_people
    test_stop_string = EngineConformance.test_a_stop_string_ends_the_text_before_it
    test_schema = EngineConformance.test_an_answer_that_fits_a_schema
    test_log_probabilities = EngineConformance.test_whole_vocabulary_of_log_probabilities
