"""What a memory is made of: our defaults where the app says nothing, the app's settings everywhere else."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mem0.configs.base import MemoryConfig
from mem0.configs.embeddings.base import BaseEmbedderConfig
from mem0.embeddings.base import EmbeddingBase
from mem0.embeddings.configs import EmbedderConfig
from mem0.llms.configs import LlmConfig
from mem0.llms.openai import OpenAILLM
from mem0.utils.factory import EmbedderFactory
from mem0.vector_stores.configs import VectorStoreConfig
from pydantic import ValidationError
from qdrant_client import QdrantClient

from inferscale_mem import AsyncInferScaleMemory, InferScaleConfig, InferScaleMemory
from inferscale_mem.adapters.mem0 import defaults
from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.adapters.mem0.extraction import CheckedLLM
from inferscale_mem.adapters.mem0.llm import EngineLLM
from inferscale_mem.errors import ConfigError, ModelError, StoreError
from inferscale_mem.testing import FakeEngine

ALICE = {"user_id": "alice"}


class Letters(EmbeddingBase):
    """An app's embedder: counts letters. Says its dimension only if told to."""

    declared: ClassVar[int | None] = None
    dims: ClassVar[int] = 26

    def __init__(self, config: BaseEmbedderConfig) -> None:
        super().__init__(config)
        self.config.embedding_dims = self.config.embedding_dims or self.declared

    def embed(self, text: str, memory_action: Any = None) -> list[float]:
        return [1.0 + text.lower().count(chr(97 + n % 26)) for n in range(self.dims)]


class LettersThatSaySo(Letters):
    declared = 26


class LettersThatLie(Letters):
    declared = 1536


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an embedder class known to Mem0 as "openai": names are checked by its settings."""

    def use(kind: type) -> None:
        providers = {**EmbedderFactory.provider_to_class, "openai": f"{__name__}.{kind.__name__}"}
        monkeypatch.setitem(sys.modules, __name__, sys.modules[Letters.__module__])
        monkeypatch.setattr(EmbedderFactory, "provider_to_class", providers)

    return use


def add_and_find(memory: InferScaleMemory) -> str:
    memory.add("I live in Lyon.", infer=False, **ALICE)
    found = memory.search("I live in Lyon.", filters=ALICE)
    return str(memory.resolve(found)["results"][0]["memory"])


def test_nothing_configured(memory: InferScaleMemory, home: Path) -> None:
    assert isinstance(memory.llm, EngineLLM) and isinstance(memory.embedding_model, LocalEmbedder)
    assert memory.config.llm.provider == memory.config.embedder.provider == "inferscale"
    assert memory.vector_store.embedding_model_dims == 384
    assert memory.config.vector_store.config.path == str(home / "inferscale" / "qdrant")
    assert memory.config.history_db_path == str(home / "inferscale" / "history.db")
    assert memory.service.signer.store == "qdrant/mem0"


def test_what_people_say_is_for_their_eyes_only(engine: FakeEngine, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        home, history = tmp_path / "new" / "home", tmp_path / "other" / "history.db"
        with InferScaleMemory(
            MemoryConfig(history_db_path=str(history)), engine=engine, inferscale={"home": str(home)}
        ) as memory:
            memory.add("Likes tea.", user_id="alice", infer=False)
            made = [*home.glob("*.db*"), *history.parent.glob("history*")]
            assert len(made) >= 3 and history in made
            assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
            memory.reset()
            assert stat.S_IMODE(history.stat().st_mode) == 0o600
        assert {stat.S_IMODE(path.stat().st_mode) for path in (home, home.parent, history.parent)} == {0o700}
        with InferScaleMemory(engine=engine, inferscale={"home": str(tmp_path / "third")}):
            assert stat.S_IMODE((tmp_path / "third" / "history.db").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_files_that_are_there_keep_their_mode(engine: FakeEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "history.db").touch(mode=0o640)
    mode = (tmp_path / "history.db").stat().st_mode
    with InferScaleMemory(engine=engine, inferscale={"home": str(tmp_path)}):
        assert (tmp_path / "history.db").stat().st_mode == mode
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_an_empty_configuration_is_none(engine: FakeEngine, home: Path) -> None:
    with InferScaleMemory.from_config({}, engine=engine) as memory:
        assert memory.config.llm.provider == memory.config.embedder.provider == "inferscale"
        assert memory.config.vector_store.config.path == str(home / "inferscale" / "qdrant")
    with InferScaleMemory(MemoryConfig(), engine=engine) as memory:
        assert memory.config.llm.provider == memory.config.embedder.provider == "inferscale"
        assert memory.config.vector_store.config.path == str(home / "inferscale" / "qdrant")


def test_everything_an_app_sets_is_kept(engine: FakeEngine, tmp_path: Path) -> None:
    given = {
        "vector_store": {"provider": "qdrant", "config": {"collection_name": "mine", "path": str(tmp_path / "q")}},
        "llm": {"provider": "openai", "config": {"api_key": "none", "model": "gpt-none", "temperature": 0.3}},
        "history_db_path": str(tmp_path / "h.db"),
        "custom_instructions": "Only drinks.",
        "version": "v1.0",
        "inferscale": {"home": str(tmp_path / "home"), "encoding": {"policy": "fact_chain(4, previous)"}},
    }
    before = repr(given)
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert isinstance(memory.llm, CheckedLLM) and isinstance(memory.llm.inner, OpenAILLM)
        assert memory.llm.config.model == "gpt-none" and memory.llm.config.temperature == 0.3
        assert memory.collection_name == "mine" and memory.service.signer.store == "qdrant/mine"
        assert memory.custom_instructions == "Only drinks." and memory.api_version == "v1.0"
        assert memory.service.config.policy == "fact_chain(4, previous)"
        assert add_and_find(memory) == "I live in Lyon."
        assert (tmp_path / "q").is_dir() and (tmp_path / "h.db").is_file()
        made = {path.name for path in (tmp_path / "home").iterdir() if not path.name.endswith(("-wal", "-shm"))}
        assert made == {"handle.key", "turns-qdrant-mine.db"}
    assert repr(given) == before, "the argument is not changed"


def test_mem0_settings_as_objects(engine: FakeEngine, home: Path) -> None:
    config = MemoryConfig(
        llm=LlmConfig(provider="openai", config={"api_key": "none"}),
        vector_store=VectorStoreConfig(config={"collection_name": "mine", "path": str(home / "q")}),
    )
    with InferScaleMemory(config, engine=engine) as memory:
        assert isinstance(memory.llm.inner, OpenAILLM)
        assert memory.collection_name == "mine" and memory.vector_store.embedding_model_dims == 384
        assert add_and_find(memory) == "I live in Lyon."
    assert config.vector_store.config.embedding_model_dims == 1536, "the argument is not changed"


def test_settings_changed_after_they_were_made(engine: FakeEngine) -> None:
    config = MemoryConfig()
    config.vector_store.config.collection_name = "mine"
    config.llm.config = {"api_key": "none"}
    with InferScaleMemory(config, engine=engine) as memory:
        assert memory.collection_name == "mine"
        assert memory.config.llm.provider == "openai"


def test_qdrant_without_a_place_lies_at_home(engine: FakeEngine, home: Path) -> None:
    given = {"vector_store": {"config": {"collection_name": "mine"}}}
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert memory.config.vector_store.config.path == str(home / "inferscale" / "qdrant")


def test_our_parts_by_name(engine: FakeEngine) -> None:
    given = {
        "llm": {"provider": "inferscale", "config": {"max_tokens": 50, "extraction": "write"}},
        "embedder": {"provider": "inferscale", "config": {}},
    }
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert memory.llm.config.max_tokens == 50 and memory.llm.config.extraction == "write"
        assert memory.embedding_model.dims == 384


def test_an_apps_own_client_is_used_and_left_open(engine: FakeEngine) -> None:
    client = QdrantClient(":memory:")
    given = {"vector_store": {"config": {"client": client, "collection_name": "mine"}}}
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert add_and_find(memory) == "I live in Lyon."
    assert client.count("mine").count == 1


def test_two_collections_do_not_share_handles(engine: FakeEngine, home: Path) -> None:
    key = {"handle_key": "ab" * 32}
    with InferScaleMemory.from_config({"inferscale": key}, engine=engine) as memory:
        memory.add("I live in Lyon.", infer=False, **ALICE)
        handle = memory.search("Lyon", filters=ALICE)["results"][0]["memory"]
        assert memory.resolve(handle) == "I live in Lyon."
    other = {"inferscale": key, "vector_store": {"config": {"collection_name": "other"}}}
    with InferScaleMemory.from_config(other, engine=engine) as memory:
        assert memory.resolve(handle) == handle
    assert not (home / "inferscale" / "handle.key").exists()


# Bad settings.


@pytest.mark.parametrize(
    "inferscale, error, match",
    [
        ({"modle": "x"}, ConfigError, "Unknown setting modle"),
        ({"encoding": {"policy": "nonsense(3)"}}, ConfigError, "policy"),
        ({"engine": {"kind": "magic"}}, ConfigError, "magic"),
        ({"engine": "vllm"}, ConfigError, "engine='vllm' must be an EngineConfig or a mapping"),
        ({"engine": {"multiprocess": "no"}}, ConfigError, "engine.multiprocess='no' must be True or False"),
        ({"engine": {"dtype": 16}}, ConfigError, "engine.dtype=16"),
        ({"engine": {"extra": [1]}}, ConfigError, "engine.extra"),
        ({"encoding": "alone"}, ConfigError, "encoding='alone' must be an EncodingConfig or a mapping"),
        ({"encoding": {"text_tail": True}}, ConfigError, "text_tail"),
        ({"encoding": {"text_tail": "all"}}, ConfigError, "auto"),
        ({"encoding": {"text_tail": "all"}}, ConfigError, "auto"),
        ({"encoding": {"max_fact_tokens": -5}}, ConfigError, "max_fact_tokens=-5 must be a positive"),
        ({"encoding": {"max_fact_tokens": "many"}}, ConfigError, "max_fact_tokens"),
        ({"model": 5}, ConfigError, "model=5 must be a Hugging Face id or a path"),
        ({"home": 5}, ConfigError, "home=5 must be a path"),
        ({"handle_key": 5}, ConfigError, "^handle_key must be hex digits"),
        ({"handle_key": "secret"}, ConfigError, "hex"),
        ({"handles": 60}, ConfigError, "handles=60 must be a HandlesConfig or a mapping"),
        ({"handles": {"expire_after": 60}}, ConfigError, "Unknown setting handles.expire_after; known are"),
        ({"handles": {"expire_after_s": 0}}, ConfigError, "expire_after_s=0 must be a whole number of seconds"),
        ({"handles": {"expire_after_s": 0.5}}, ConfigError, "expire_after_s=0.5 must be a whole number"),
        ({"handles": {"expire_after_s": True}}, ConfigError, "expire_after_s=True"),
        ({"handles": {"expire_after_s": "1h"}}, ConfigError, "expire_after_s='1h'"),
        ({"handles": {"expire_after_s": 1 << 40}}, ConfigError, "100 years"),
        ({"home": ""}, ConfigError, "home is empty"),
        ({"home": " "}, ConfigError, "home is empty"),
        ({"embedder": "/no/such/embedder"}, ModelError, "/no/such/embedder"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(
    engine: FakeEngine, home: Path, inferscale: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        InferScaleMemory(inferscale=inferscale, engine=engine)
    assert not (home / "inferscale").exists()


def test_an_unknown_model_is_refused_before_anything_is_made(home: Path) -> None:
    with pytest.raises(ModelError, match="/no/such/model"):
        InferScaleMemory(inferscale={"model": "/no/such/model"})
    assert not (home / "inferscale").exists()


def test_settings_of_a_wrong_kind(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="inferscale must be"):
        InferScaleMemory(inferscale="model=x", engine=engine)  # type: ignore[arg-type]
    settings = InferScaleConfig(handle_key="cd" * 32)
    with InferScaleMemory(inferscale=settings, engine=engine) as memory:
        assert memory.service.signer.store == "qdrant/mem0"


def test_mem0_refuses_what_it_does_not_know(engine: FakeEngine) -> None:
    with pytest.raises(ValidationError, match="Unsupported LLM provider"):
        InferScaleMemory.from_config({"llm": {"provider": "nobody", "config": {}}}, engine=engine)
    with pytest.raises(ValueError, match="Unsupported Llm provider"):
        InferScaleMemory.from_config({"llm": {"provider": "nobody"}}, engine=engine)


def test_a_failed_start_leaves_no_lock(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(Exception, match="api_key"):
        InferScaleMemory.from_config({"llm": {"provider": "openai"}}, engine=engine)
    with InferScaleMemory(engine=engine) as memory:
        assert add_and_find(memory) == "I live in Lyon."


@pytest.mark.parametrize(
    "given, match",
    [
        (None, "must be a dict, not NoneType"),
        (5, "must be a dict, not int"),
        ("x", "must be a dict, not str"),
        ({"bogus": 1}, "Unknown key bogus .* known are: .*vector_store"),
        ({"vector_stoer": {}}, "Unknown key vector_stoer"),
        ({"llm": {"model": "x"}}, "Unknown key llm.model .* llm.config"),
        ({"vector_store": {"config": 5}}, "vector_store.config must be a dict, not int"),
        ({"embedder": {"provider": "inferscale", "config": "x"}}, "embedder.config must be a dict"),
    ],
)
def test_configurations_that_nobody_can_read(engine: FakeEngine, home: Path, given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        InferScaleMemory.from_config(given, engine=engine)
    assert not (home / "inferscale").exists()


def test_keys_that_mem0_once_had_are_taken(engine: FakeEngine) -> None:
    given = {"graph_store": {"provider": "neo4j"}, "custom_prompt": "x"}
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert add_and_find(memory) == "I live in Lyon."


@pytest.mark.parametrize("kind", [InferScaleMemory, AsyncInferScaleMemory])
def test_objects_of_a_wrong_kind(engine: FakeEngine, kind: type) -> None:
    with pytest.raises(ConfigError, match="from_config takes a dict"):
        kind({"llm": {}}, engine=engine)
    with pytest.raises(ConfigError, match="engine must be an engine of this package, not int"):
        kind(engine=5)


@pytest.mark.parametrize(
    "given, error, match",
    [
        ({"inferscale": {"home": "FILE/home"}}, ConfigError, "FILE/home for the history .* cannot be made"),
        ({"inferscale": {"home": "FILE"}}, ConfigError, "FILE for the history .* cannot be made"),
        ({"vector_store": {"config": {"path": "FILE/q"}}}, ConfigError, "FILE for Qdrant .* cannot be made"),
        ({"vector_store": {"config": {"path": "FILE"}}}, StoreError, "FILE cannot be used"),
        ({"history_db_path": "FILE/history.db"}, ConfigError, "FILE for the history .* cannot be made"),
        ({"history_db_path": "FOLDER"}, ConfigError, "is a folder; name a file"),
        ({"history_db_path": "FILE"}, StoreError, "history in FILE cannot be opened .*not a database"),
        ({"vector_store": {"config": {"url": "http://localhost:1"}}}, StoreError, "http://localhost:1 does not answer"),
        ({"vector_store": {"config": {"host": "localhost", "port": 1}}}, StoreError, "localhost:1 does not answer"),
    ],
)
def test_places_that_cannot_be_used(
    engine: FakeEngine, tmp_path: Path, given: dict[str, Any], error: type[Exception], match: str
) -> None:
    (tmp_path / "file").write_text("This is no database. " * 100, encoding="utf-8")

    def place(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: place(inner) for key, inner in value.items()}
        names = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
        return re.sub("FILE|FOLDER", lambda found: names[found[0]], value) if isinstance(value, str) else value

    with pytest.raises(error, match=place(match)) as caught:
        InferScaleMemory.from_config(place(given), engine=engine)
    assert caught.value.__cause__ is not None or "FOLDER" in given.values()
    with InferScaleMemory(engine=engine) as memory:  # nothing is left locked
        assert add_and_find(memory) == "I live in Lyon."


@pytest.mark.parametrize(
    "file, match",
    [
        ("history.db", "The history in FILE cannot be opened .*move that one out of the way"),
        ("turns-qdrant-mem0.db", "The latest turns of conversations in FILE cannot be opened .*no fact is in it"),
        ("qdrant/collection/mem0/storage.sqlite", "The Qdrant collection in FILE cannot be opened .*backup"),
        ("qdrant/meta.json", "FILE cannot be read .*lists Qdrant's collections"),
    ],
)
@pytest.mark.parametrize("damage", [b"", b"This is not it. " * 500, b"\xff\xfe\x80" * 500])
def test_a_damaged_file_is_named(engine: FakeEngine, home: Path, file: str, match: str, damage: bytes) -> None:
    with InferScaleMemory(engine=engine) as memory:
        assert add_and_find(memory) == "I live in Lyon."
    path = home / "inferscale" / file
    whole = path.read_bytes()
    path.write_bytes(damage)
    if not damage and path.suffix != ".json":
        InferScaleMemory(engine=engine).close()  # an empty file is an empty database
        return
    with pytest.raises(StoreError, match=match.replace("FILE", re.escape(str(path)))):
        InferScaleMemory(engine=engine)
    path.write_bytes(whole)
    with InferScaleMemory(engine=engine) as memory:
        assert len(memory.get_all(filters=ALICE)["results"]) == 1


def test_a_damaged_page_is_found(engine: FakeEngine, home: Path) -> None:
    with InferScaleMemory(engine=engine) as memory:
        add_and_find(memory)
    path = home / "inferscale" / "qdrant" / "collection" / "mem0" / "storage.sqlite"
    whole = bytearray(path.read_bytes())
    whole[4096:] = b"\xff" * (len(whole) - 4096)
    path.write_bytes(whole)
    with pytest.raises(StoreError, match=f"{re.escape(str(path))} cannot be opened"):
        InferScaleMemory(engine=engine)


def test_the_list_of_collections_can_be_had_from_another_home(engine: FakeEngine, home: Path, tmp_path: Path) -> None:
    """As the error says."""
    with InferScaleMemory(engine=engine) as memory:
        add_and_find(memory)
    listed = home / "inferscale" / "qdrant" / "meta.json"
    listed.write_text("{}")
    with pytest.raises(StoreError, match="another home"):
        InferScaleMemory(engine=engine)
    with InferScaleMemory(inferscale={"home": tmp_path}, engine=engine) as other:
        add_and_find(other)
    listed.write_bytes((tmp_path / "qdrant" / "meta.json").read_bytes())
    with InferScaleMemory(engine=engine) as memory:
        assert len(memory.get_all(filters=ALICE)["results"]) == 1


# Dimensions (case M7).


@pytest.mark.parametrize("kind", [LettersThatSaySo, Letters])
def test_dims_in_the_embedders_settings(engine: FakeEngine, letters: Any, kind: type) -> None:
    letters(kind)
    given = {"embedder": {"provider": "openai", "config": {"embedding_dims": 26}}}
    with InferScaleMemory.from_config(given, engine=engine) as memory:
        assert memory.vector_store.embedding_model_dims == 26
        assert add_and_find(memory) == "I live in Lyon."


def test_dims_that_only_the_embedder_says(engine: FakeEngine, letters: Any) -> None:
    letters(LettersThatSaySo)
    for _ in range(2):
        with InferScaleMemory.from_config({"embedder": {"provider": "openai"}}, engine=engine) as memory:
            assert add_and_find(memory) == "I live in Lyon."


@pytest.mark.parametrize("kind", [Letters, LettersThatLie])
def test_dims_that_nobody_says_fail_before_anything_is_written(engine: FakeEngine, letters: Any, kind: type) -> None:
    letters(kind)
    with InferScaleMemory.from_config({"embedder": {"provider": "openai"}}, engine=engine) as memory:
        with pytest.raises(ConfigError, match="embedding_model_dims=26"):
            memory.add("I live in Lyon.", infer=False, **ALICE)
        assert memory.get_all(filters=ALICE)["results"] == []
        assert memory.db.connection.execute("SELECT COUNT(*) FROM history").fetchone() == (0,)


def test_dims_that_contradict_each_other(engine: FakeEngine, letters: Any) -> None:
    letters(LettersThatSaySo)
    given = {"embedder": {"provider": "openai"}, "vector_store": {"config": {"embedding_model_dims": 99}}}
    with pytest.raises(ConfigError, match=r"gives 26 .* takes 99"):
        InferScaleMemory.from_config(given, engine=engine)


def test_another_embedder_for_a_filled_collection(engine: FakeEngine, letters: Any) -> None:
    with InferScaleMemory(engine=engine) as memory:
        add_and_find(memory)
    letters(LettersThatSaySo)
    with pytest.raises(ConfigError, match=r"gives 26 .* takes 384"):
        InferScaleMemory.from_config({"embedder": {"provider": "openai"}}, engine=engine)
    with InferScaleMemory(engine=engine) as memory:
        assert len(memory.get_all(filters=ALICE)["results"]) == 1


def test_declared_dims_of_anything() -> None:
    assert defaults.declared_dims(object()) is None
    assert defaults.declared_dims(Letters(BaseEmbedderConfig(embedding_dims=26))) == 26


def test_embedder_settings_are_not_changed() -> None:
    given = EmbedderConfig.model_construct(provider="inferscale", config={})
    defaults.complete(MemoryConfig().model_copy(update={"embedder": given}), InferScaleConfig.from_env())
    assert given.config == {}


# Telemetry.


@pytest.mark.parametrize(
    "before, first, expected",
    [
        (None, "", "False False false"),
        (None, "import mem0; ", "False False false"),
        ("true", "", "True True true"),
        ("false", "", "False False false"),
    ],
)
def test_telemetry_is_off_unless_asked_for(home: Path, before: str | None, first: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MEM0_TELEMETRY"}
    if before is not None:
        environment["MEM0_TELEMETRY"] = before
    script = (
        f"import os; {first}import inferscale_mem.adapters.mem0; "
        "import mem0.memory.main as m, mem0.memory.telemetry as t; "
        "print(m.MEM0_TELEMETRY, t.MEM0_TELEMETRY, os.environ['MEM0_TELEMETRY'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, cwd=Path.cwd()
    )
    assert result.stdout.split() == expected.split()


def test_importing_the_adapter_is_light() -> None:
    script = "import sys, inferscale_mem.adapters.mem0; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert not {"torch", "transformers", "vllm", "langchain_core"} & set(result.stdout.split())
