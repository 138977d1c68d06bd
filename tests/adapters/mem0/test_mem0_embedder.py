"""The local embedder, on the real model."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from mem0.configs.embeddings.base import BaseEmbedderConfig

from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError, InputError, ModelError
from inferscale_mem.models import resolve_embedder

TEXTS = ["I live in Lyon.", "My home is in a French city.", "The engine is cold.", "🎉", "word " * 3000, "x"]


@pytest.fixture(scope="module")
def embedder() -> LocalEmbedder:
    return LocalEmbedder()


@pytest.fixture(scope="module")
def source() -> Path:
    return Path(resolve_embedder(InferScaleConfig.from_env()))


def test_unit_vectors_of_the_models_size(embedder: LocalEmbedder) -> None:
    vectors = np.array(embedder.embed_batch(TEXTS))
    assert vectors.shape == (len(TEXTS), embedder.dims) == (len(TEXTS), 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)


def test_similar_texts_are_near(embedder: LocalEmbedder) -> None:
    lyon, city, engine = (np.array(embedder.embed(text)) for text in TEXTS[:3])
    assert lyon @ city > 0.4 > lyon @ engine


def test_a_batch_is_its_texts_one_by_one(embedder: LocalEmbedder) -> None:
    short = TEXTS[:4]
    batch = np.array(embedder.embed_batch(short * 17))
    single = np.array([embedder.embed(text, "search") for text in short])
    np.testing.assert_allclose(batch, np.tile(single, (17, 1)), atol=1e-5)
    assert embedder.embed_batch([]) == []


def test_equals_the_reference(embedder: LocalEmbedder, source: Path) -> None:
    """Mean over the last hidden states of all tokens, as the model's card has it."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(source)(TEXTS[0], return_tensors="pt")
    with torch.inference_mode():
        mean = AutoModel.from_pretrained(source)(**tokens).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(embedder.embed(TEXTS[0]), (mean / mean.norm()).numpy(), atol=1e-5)


def test_threads(embedder: LocalEmbedder) -> None:
    expected = np.array(embedder.embed_batch(TEXTS[:4]))
    results: list[np.ndarray] = []
    work = lambda: results.append(np.array([embedder.embed(text) for text in TEXTS[:4]]))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results:
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("text", ["broken \ud83d", None, 7])
def test_bad_input(embedder: LocalEmbedder, text: object) -> None:
    with pytest.raises(InputError):
        embedder.embed_batch(["fine", text])  # type: ignore[list-item]


def copy_of(source: Path, folder: Path, **changes: object) -> str:
    """The model's small files, one of them changed: enough to be constructed."""
    folder.mkdir()
    for name in ("config.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(source / name, folder / name)
    for name, content in changes.items():
        path = folder / {"config": "config.json", "pooling": "1_Pooling/config.json"}[name]
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))  # type: ignore[dict-item]
    return str(folder)


def test_its_size_is_known_without_weights(source: Path, tmp_path: Path) -> None:
    embedder = LocalEmbedder(BaseEmbedderConfig(model=copy_of(source, tmp_path / "m")))
    assert embedder.dims == embedder.config.embedding_dims == 384
    with pytest.raises(ModelError, match="cannot be loaded"):
        embedder.embed("x")


def test_wrong_dims(source: Path) -> None:
    with pytest.raises(ConfigError, match="embedding_dims=100"):
        LocalEmbedder(BaseEmbedderConfig(model=str(source), embedding_dims=100))


def test_models_that_are_no_sentence_encoders(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot be found"):
        LocalEmbedder(BaseEmbedderConfig(model=str(tmp_path / "empty")))
    with pytest.raises(ModelError, match="hidden_size"):
        LocalEmbedder(BaseEmbedderConfig(model=copy_of(source, tmp_path / "a", config={"hidden_size": None})))
    pooling = {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        LocalEmbedder(BaseEmbedderConfig(model=copy_of(source, tmp_path / "b", pooling=pooling)))
    with pytest.raises(ModelError, match="no/such-model"):
        LocalEmbedder(BaseEmbedderConfig(model="no/such-model"))


def test_cls_pooling(source: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = tmp_path / "cls"
    copy_of(source, folder, pooling={"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True})
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).symlink_to(source / name)
    tokens = AutoTokenizer.from_pretrained(source)(TEXTS[0], return_tensors="pt")
    with torch.inference_mode():
        first = AutoModel.from_pretrained(source)(**tokens).last_hidden_state[0, 0]
    got = LocalEmbedder(BaseEmbedderConfig(model=str(folder))).embed(TEXTS[0])
    np.testing.assert_allclose(got, (first / first.norm()).numpy(), atol=1e-5)
