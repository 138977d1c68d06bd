"""Mem0's own memory and ours over the same stored facts, for measurements. Importing it loads Mem0."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from inferscale_mem.adapters.mem0 import InferScaleMemory  # before Mem0: it turns Mem0's telemetry off
from inferscale_mem.adapters.mem0.embedder import LocalEmbedder
from inferscale_mem.adapters.mem0.extraction import CheckedLLM
from inferscale_mem.adapters.mem0.index import VectorIndex
from inferscale_mem.cli.bench.report import progress
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.handles import HandleSigner
from inferscale_mem.protocols import Engine

from mem0 import Memory  # isort: skip
from mem0.configs.base import MemoryConfig  # isort: skip
from mem0.embeddings.configs import EmbedderConfig  # isort: skip
from mem0.llms.base import LLMBase  # isort: skip
from mem0.llms.configs import LlmConfig  # isort: skip
from mem0.vector_stores.configs import VectorStoreConfig  # isort: skip
from mem0.vector_stores.qdrant import Qdrant  # isort: skip

OWNER = "user"
BATCH = 256
"""Facts embedded, and stored, between two lines of progress."""

_PLACES = ("Lyon", "Oslo", "Porto", "Kyoto", "Quito", "Riga", "Cork", "Turin", "Ghent", "Split", "Tartu")
_THINGS = ("an old violin", "green tea", "a red bicycle", "two grey cats", "a book on knots", "fresh figs", "a kite")
_STAMP = "2026-01-01T00:00:00+00:00"


class Echo(LLMBase):  # type: ignore[misc]  # Mem0 ships no types
    """An extraction LLM that takes no time: its reply is the one fact it was told."""

    fact = ""

    def generate_response(self, *args: Any, **kwargs: Any) -> str:
        """The reply that Mem0's pipeline reads."""
        return json.dumps({"memory": [{"text": self.fact}]})


@dataclass(frozen=True)
class Pair:
    """Both memories, on copies of one store, with one embedder and one extraction LLM between them."""

    mem0: Memory
    ours: InferScaleMemory
    llm: Echo


def fact_text(number: int) -> str:
    """A fact of some 20 tokens; no two are alike."""
    place, thing = _PLACES[number % len(_PLACES)], _THINGS[number // 3 % len(_THINGS)]
    return f"On trip {number} to {place} the user bought {thing} and stayed for {2 + number % 12} days."


def question(number: int) -> str:
    """What a search asks."""
    return f"Which trip to {_PLACES[number % len(_PLACES)]} was it where I bought {_THINGS[number % len(_THINGS)]}?"


def embeddings(embedder: LocalEmbedder, count: int) -> list[list[float]]:
    """Of the first facts, in batches."""
    found: list[list[float]] = []
    for start in range(0, count, BATCH):
        progress(f"embedding facts: {start} of {count}")
        found += embedder.embed_batch([fact_text(n) for n in range(start, min(start + BATCH, count))])
    return found


@contextlib.contextmanager
def opened(
    vectors: Sequence[Sequence[float]], embedder: LocalEmbedder, engine: Engine, settings: InferScaleConfig
) -> Iterator[Pair]:
    """Both memories over as many facts as there are vectors, all of one owner: the most that a search can have to read.

    The store is filled by Mem0's own class, and copied.
    """
    with tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder, contextlib.ExitStack() as stack:
        with _filled(vectors, embedder.dims) as made:
            for name in ("mem0", "ours"):
                shutil.copytree(made, Path(folder, name, "qdrant"))
        llm = Echo()
        mem0 = Memory(_config(Path(folder, "mem0"), embedder.dims))
        stack.callback(mem0.vector_store.client.close)
        stack.callback(mem0.close)
        ours = InferScaleMemory(_config(Path(folder, "ours"), embedder.dims), inferscale=settings, engine=engine)
        stack.callback(ours.close)
        mem0.embedding_model = ours.embedding_model = embedder
        mem0.llm, ours.llm = llm, CheckedLLM(llm)
        yield Pair(mem0, ours, llm)


@contextlib.contextmanager
def indexed(vectors: Sequence[Sequence[float]], embedder: LocalEmbedder, signer: HandleSigner) -> Iterator[VectorIndex]:
    """The index over as many facts as there are vectors, with nobody who encodes them."""
    with _filled(vectors, embedder.dims) as folder, contextlib.ExitStack() as stack:
        store = Qdrant("mem0", embedder.dims, path=str(folder))
        stack.callback(store.client.close)
        yield VectorIndex(signer.store, lambda: store, signer.handle_id, embedder.embed_batch, exclusive=True)


@contextlib.contextmanager
def _filled(vectors: Sequence[Sequence[float]], dims: int) -> Iterator[Path]:
    """A store with so many facts, for as long as the block lasts."""
    # Embedded Qdrant waits for the disk after every point: made in memory where there is such a place.
    quick = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=quick if quick.is_dir() else None) as made:
        store = Qdrant("mem0", dims, path=made)
        for start in range(0, len(vectors), BATCH):
            progress(f"storing facts: {start} of {len(vectors)}")
            numbers = range(start, min(start + BATCH, len(vectors)))
            store.insert(
                [vectors[n] for n in numbers], [_payload(n) for n in numbers], [str(UUID(int=n)) for n in numbers]
            )
        store.client.close()
        yield Path(made)


def _payload(number: int) -> dict[str, Any]:
    """As Mem0 writes it."""
    text = fact_text(number)
    return {
        "data": text,
        "hash": hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(),
        "created_at": _STAMP,
        "updated_at": _STAMP,
        "text_lemmatized": text,
        "user_id": OWNER,
        "role": "user",
    }


def _config(folder: Path, dims: int) -> MemoryConfig:
    return MemoryConfig(
        # Both are replaced by what is shared; these two start without a model or a network.
        llm=LlmConfig(provider="openai", config={"api_key": "none"}),
        embedder=EmbedderConfig.model_construct(provider="inferscale", config={}),
        vector_store=VectorStoreConfig(config={"path": str(folder / "qdrant"), "embedding_model_dims": dims}),
        history_db_path=str(folder / "history.db"),
    )
