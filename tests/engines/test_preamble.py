"""Facts encoded behind a preamble: one that is the header's own changes nothing, another one does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import preamble_helpers
import pytest
import tiny_models
from recorder_helpers import KEY, new_fact
from small_index import SmallIndex

from inferscale_mem.config import EncodingConfig, EngineConfig
from inferscale_mem.engines.transformers_embedded import TransformersEngine
from inferscale_mem.errors import BudgetError, ConfigError
from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import Engine
from inferscale_mem.remote import ServerInfo
from inferscale_mem.service import MemoryService
from inferscale_mem.types import Sampling, Scope

FAMILIES = ("llama", "gemma3")
FIRST = Sampling(max_tokens=1, temperature=0.0, logprobs=-1)
Open = Callable[..., Engine]


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.engine)])
def open_engine(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens one engine at a time."""
    opened: list[Engine] = []

    def open_one(path: str, **settings: object) -> Engine:
        close_all()
        given = {"dtype": "float32", "record_bytes": 8 << 20, **settings}
        if request.param == "transformers":
            opened.append(TransformersEngine(path, EngineConfig(kind="transformers", **given), KEY))
        else:
            from inferscale_mem.engines.vllm_local import VllmEngine

            caches = {"multiprocess": False, "block_size": 32, "kv_cache_bytes": 32 << 20}
            opened.append(VllmEngine(path, EngineConfig(**caches, **given), KEY))
        return opened[-1]

    def close_all() -> None:
        while opened:
            opened.pop().close()

    yield open_one
    close_all()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(request.param, tmp_path_factory.mktemp(request.param), hidden_size=128)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), hidden_size=128)


def first_token(engine: Engine, policy: str = "fact_chain(2, previous)") -> dict[int, float]:
    """The distribution of an answer from four facts, all of which are injected."""
    signer = HandleSigner(KEY, "tests")
    index = SmallIndex(signer)
    service = MemoryService(engine, index, signer, EncodingConfig(policy=policy))
    facts = [dataclasses.replace(new_fact(text), id=text) for text in ("Likes tea.", "Has a dog.", "Is 30.", "Sings.")]
    index.put(*facts)
    service.add(facts)
    try:
        assert service.wait(60)
        assert service.recorder.counters["encoded"] == 4, service.recorder.failures
        handles = [signer.mint(fact) for fact in facts]
        plan = service.plan([{"role": "user", "content": "Hello"}], handles, Scope(user_id="alice"))
        service.recorder.ensure_headers([segment for segment in plan.segments if segment.kind == "header"])
        *_, last = engine.generate(plan, FIRST)
        assert last.report is not None
        assert last.report.facts_injected == 4
        assert last.logprobs is not None
        return dict(last.logprobs[0])
    finally:
        service.close()


def apart(one: dict[int, float], two: dict[int, float]) -> float:
    """Over tokens that either finds possible."""
    likely = [token for token in one if max(one[token], two[token]) > -30]
    return max(abs(one[token] - two[token]) for token in likely)


@pytest.mark.parametrize("record_dtype", ["auto", "int8"])
def test_the_headers_own_changes_nothing_and_another_one_does(
    open_engine: Open, model: str, record_dtype: str, tmp_path: Path
) -> None:
    own, other = (preamble_helpers.save(model, tmp_path / f"{noise}", noise) for noise in (0.0, 1.0))
    plain = first_token(open_engine(model, record_dtype=record_dtype))
    assert apart(plain, first_token(open_engine(model, record_dtype=record_dtype, preamble=own))) < 1e-3
    assert apart(plain, first_token(open_engine(model, record_dtype=record_dtype, preamble=other))) > 0.05


def test_its_record_counts_and_its_fingerprint_differs(open_engine: Open, llama: str, tmp_path: Path) -> None:
    own, other = (preamble_helpers.save(llama, tmp_path / f"{noise}", noise) for noise in (0.0, 1.0))
    infos = [open_engine(llama, preamble=preamble).info for preamble in (None, own, other)]
    assert len({info.fingerprint for info in infos}) == 3
    assert infos[0].preamble is None
    said = json.loads(json.dumps(ServerInfo(infos[1], 300, "digest").to_json()))
    assert ServerInfo.from_json(said).engine == infos[1]


def test_alone_has_nothing_to_do_with_it(open_engine: Open, llama: str, tmp_path: Path) -> None:
    plain = first_token(open_engine(llama), "alone")
    other = preamble_helpers.save(llama, tmp_path / "p", 1.0)
    assert apart(plain, first_token(open_engine(llama, preamble=other), "alone")) < 1e-5


def test_a_fact_is_not_encoded_behind_a_header_instead(open_engine: Open, llama: str, tmp_path: Path) -> None:
    engine = open_engine(llama, preamble=preamble_helpers.save(llama, tmp_path / "p"))
    assert engine.info.preamble is not None
    engine.drop([str(engine.info.preamble.record)])
    signer = HandleSigner(KEY, "tests")
    index = SmallIndex(signer)
    service = MemoryService(engine, index, signer, EncodingConfig())
    fact = new_fact("Likes tea.")
    index.put(fact)
    try:
        service.add([fact])
        service.wait(60)
        assert "lost the preamble" in service.recorder.failures[signer.mint(fact)]
        assert not service.recorder.is_ready(service.planner.record_id(signer.mint(fact)))
        assert engine.status().records == 0
    finally:
        service.close()


def test_no_room_for_it(llama: str, tmp_path: Path) -> None:
    file = preamble_helpers.save(llama, tmp_path / "p")
    with pytest.raises(BudgetError):
        TransformersEngine(llama, EngineConfig(kind="transformers", record_bytes=1, preamble=file), KEY)


def test_of_another_model_or_template_is_refused_at_start(open_engine: Open, tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path / "one", hidden_size=128)
    larger = tiny_models.save("llama", tmp_path / "two", hidden_size=128, num_hidden_layers=3)
    file = preamble_helpers.save(larger, tmp_path / "p")
    with pytest.raises(ConfigError, match="other layers or heads"):
        open_engine(model, preamble=file)
    template = Path(model, "chat_template.jinja")
    template.write_text(template.read_text() + " ")
    fitting = preamble_helpers.save(model, tmp_path / "q")
    template.write_text(template.read_text() + " ")
    with pytest.raises(ConfigError, match="another tokenizer or chat template"):
        open_engine(model, preamble=fitting)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_engine(model, preamble=str(tmp_path / "missing"))
