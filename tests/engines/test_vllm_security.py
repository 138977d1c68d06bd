"""What strangers can do with ``kv_transfer_params``: nothing. On a live engine with a key."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models

from inferscale_mem import wire
from inferscale_mem.config import EngineConfig
from inferscale_mem.errors import ConfigError
from inferscale_mem.testing.scene import ALICE, KEY, STORE, Scene, Segment, Span
from inferscale_mem.types import EncodePlan, PromptPlan, Sampling

pytestmark = pytest.mark.engine

STRANGER = bytes(32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from inferscale_mem.engines.vllm_local import VllmEngine

    path = tiny_models.save("llama", tmp_path_factory.mktemp("llama"), hidden_size=128)
    sizes = {"block_size": 32, "record_bytes": 16 << 20, "kv_cache_bytes": 32 << 20}
    engine = VllmEngine(path, EngineConfig(multiprocess=False, dtype="float32", **sizes), KEY)
    yield engine
    engine.close()


class Stranger:
    """Sends raw parameters to an engine, signed with another key or not at all."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def send(self, params: Any, token_ids: list[int] | None = None, key: bytes | None = None) -> Any:
        """The connector's answer."""
        tokens = token_ids or [1, 2, 3]
        return self._engine._submit(self._send(wire.sign(params, tokens, key), tokens)).result()

    async def _send(self, params: Any, tokens: list[int]) -> Any:
        answer = None
        async for output in self._engine._run(tokens, Sampling(max_tokens=1, temperature=0.0), params, 1):
            answer = output.answer or answer
        return answer


@pytest.mark.parametrize("key", [None, STRANGER], ids=["unsigned", "signed with another key"])
def test_strangers_cannot_inject_replace_drop_or_look(engine: Any, key: bytes | None) -> None:
    scene, stranger = Scene(engine), Stranger(engine)
    memory = scene.memory("Likes locks.")
    scene.encode_all([memory])
    held = engine.status()
    plan = scene.plan([memory])
    tokens = plan.token_ids
    span = Span(memory.record, 0, len(tokens), memory.handle, ALICE)
    for params in (
        wire.inject_params(plan),
        wire.encode_params(EncodePlan((Segment("text", tuple(tokens)),), (span,), ALICE, STORE)),
        wire.encode_params(EncodePlan((), (Span(str(scene.header.record), 0, 3),))),
        wire.drop_params([memory.handle, str(scene.header.record)]),
        wire.status_params(),
    ):
        assert stranger.send(params, tokens, key) == {"v": 1, "op": "inject", "error": wire.UNSIGNED}
    after = engine.status()
    assert (after.records, after.counters["refused"]) == (held.records, held.counters.get("refused", 0) + 5)
    assert scene.ask(plan).report.facts_injected == 1


def test_even_a_signed_order_cannot_give_a_record_another_facts_name(engine: Any) -> None:
    scene = Scene(engine)
    memory, other = scene.memories(2)
    scene.encode_all([memory])
    segment = Segment("text", scene.suffix.token_ids)
    for handle, scope in ((None, None), (other.handle, ALICE)):
        plan = EncodePlan((segment,), (Span(memory.record, 0, 4, handle, scope),), ALICE, STORE)
        report = engine.encode(plan)
        assert report.encoded == () and report.refused[memory.record]
    assert scene.ask(scene.plan([memory])).report.facts_injected == 1


def _anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return None
    if kind == 1:
        return rng.choice([True, False])
    if kind == 2:
        return rng.choice([0, 1, -1, 2**31, 2**62, -(2**40), 3])
    if kind == 3:
        return rng.choice([0.5, -1e300, float("inf"), float("nan")])
    if kind in (4, 5):
        return rng.choice(["", "inject", "encode", "drop", "probe", "status", "x" * 1000, "ism1.a.b", "\0", "é"])
    if kind == 6:
        return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ["v", "op", "segments", "spans", "scope", "store", "handles", "signature", "record", "start", "end", "x"]
    return {rng.choice(names): _anything(rng, depth + 1) for _ in range(rng.randrange(6))}


def _fields(rng: random.Random) -> dict[str, Any]:
    found = _anything(rng)
    return found if isinstance(found, dict) else {}


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_no_parameters_stop_the_engine(engine: Any, key: bytes | None) -> None:
    """Signed ones, too: whoever holds the key may be in error."""
    scene, stranger, rng = Scene(engine), Stranger(engine), random.Random(0)
    memory = scene.memory("Likes noise.")
    scene.encode_all([memory])
    for _ in range(300):
        order = _anything(rng) if rng.random() < 0.3 else {"v": 1, **_fields(rng)}
        if isinstance(order, dict):
            order.setdefault("op", rng.choice(wire.OPS))
            order.setdefault(rng.choice(["segments", "spans", "scope", "handles"]), _anything(rng))
        params = {wire.KEY: order}
        answer = stranger.send(params, [1, 2, 3, 4], key if isinstance(order, dict) else None)
        assert answer is not None
        if key is None:
            assert answer["error"] == wire.UNSIGNED
    assert scene.ask(PromptPlan(scene.plan([memory]).segments, ALICE, STORE)).tokens


def test_a_connector_without_a_key_is_refused(tmp_path: Any) -> None:
    from inferscale_mem.kv.connector import read_key

    with pytest.raises(ConfigError, match="handle_key_file"):
        read_key({})
    with pytest.raises(ConfigError, match="handle_key_file"):
        read_key({"unsigned_orders": "yes"})
    short = tmp_path / "short.key"
    short.write_text("0011")
    with pytest.raises(ConfigError, match="128 bits"):
        read_key({"handle_key_file": str(short)})
    assert read_key({"unsigned_orders": True}) is None
