from __future__ import annotations

from typing import Any

from inferscale_mem.engines.vllm_schema import LEAST, STYLE, guided

TEXT: dict[str, Any] = {"type": "string"}


def test_strings_share_what_the_answer_may_have() -> None:
    schema = {
        "type": "object",
        "properties": {"a": TEXT, "b": {"anyOf": [TEXT, {"type": "null"}]}, "n": {"type": "integer"}},
    }
    made = guided(schema, 90)
    assert made["properties"]["a"] == {"type": "string", "maxLength": 60}
    assert made["properties"]["b"]["anyOf"] == [{"type": "string", "maxLength": 60}, {"type": "null"}]
    assert made["properties"]["n"] == {"type": "integer"} and schema["properties"]["a"] == TEXT


def test_what_is_bounded_stays_as_it_is() -> None:
    for bound in ({"enum": ["x"]}, {"maxLength": 900}, {"pattern": "a+"}, {"format": "date"}, {"const": "x"}):
        assert guided({**TEXT, **bound}, 10) == {**STYLE, **TEXT, **bound}
    assert guided({**TEXT, "minLength": 500}, 10)["maxLength"] == 500
    assert guided(TEXT, 1)["maxLength"] == LEAST


def test_without_a_limit_there_is_none() -> None:
    assert guided({"items": TEXT, "default": [TEXT]}, None) == {**STYLE, "items": TEXT, "default": [TEXT]}
