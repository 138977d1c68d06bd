"""The file of a trained preamble: what it says is read back, and everything else is refused with words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inferscale_mem.config import EngineConfig
from inferscale_mem.errors import BudgetError, ConfigError
from inferscale_mem.kv.directory import Directory, Wanted, first_pages
from inferscale_mem.kv.preamble import FORMAT, Preamble, save
from inferscale_mem.types import Scope

TOKENS = tuple(range(11))
SHAPES = ((2, 4), (1, 8))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "preamble.safetensors"
    save(path, TOKENS, "digest", [(torch.rand(11, *shape), torch.rand(11, *shape)) for shape in SHAPES])
    return path


def test_what_was_saved_is_read_back(file: Path) -> None:
    opened = Preamble.open(str(file))
    assert opened.segment.kind == "header"
    assert opened.segment.token_ids == TOKENS
    opened.check("digest")
    save(file.with_name("again"), TOKENS, "digest", opened.load(SHAPES))
    pairs = zip(opened.load(SHAPES), Preamble.open(str(file.with_name("again"))).load(SHAPES), strict=True)
    assert all(torch.equal(one, two) for layers in pairs for one, two in zip(*layers, strict=True))


def test_another_content_has_another_record(file: Path) -> None:
    one = Preamble.open(str(file)).segment.record
    save(file, TOKENS, "digest", [(torch.rand(11, *shape), torch.rand(11, *shape)) for shape in SHAPES])
    assert Preamble.open(str(file)).segment.record != one


@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES[::-1], (*SHAPES, (1, 8))])
def test_of_another_model(file: Path, shapes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="other layers or heads"):
        Preamble.open(str(file)).load(shapes)


def test_of_another_tokenizer(file: Path) -> None:
    with pytest.raises(ConfigError, match="another tokenizer or chat template"):
        Preamble.open(str(file)).check("other")


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"format": FORMAT},
        {"format": FORMAT, "tokenizer": "t", "token_ids": "[]"},
        {"format": FORMAT, "tokenizer": "t", "token_ids": "7"},
        {"format": FORMAT, "tokenizer": "t", "token_ids": "nonsense"},
        {"format": "other", "tokenizer": "t", "token_ids": "[1]"},
    ],
)
def test_other_files_of_tensors(tmp_path: Path, said: dict[str, str]) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "f", said)
    with pytest.raises(ConfigError, match=r"cannot be used.*inferscale-mem train"):
        Preamble.open(str(tmp_path / "f"))


@pytest.mark.parametrize("content", [b"", b"not tensors", b"\xff" * 100])
def test_no_tensors_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used"):
        Preamble.open(str(tmp_path / "f"))
    with pytest.raises(ConfigError, match="cannot be used"):
        Preamble.open(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be used"):
        Preamble.open(str(tmp_path / "missing"))


def test_a_server_has_its_own() -> None:
    with pytest.raises(ConfigError, match="serve --preamble"):
        EngineConfig(base_url="http://localhost:8000/v1", preamble="f")


def test_its_record_stays_and_is_everybodys() -> None:
    directory = Directory(num_pages=4, page_size=8, page_bytes=64)
    assert directory.install("preamble.x", TOKENS).pages == first_pages(len(TOKENS))
    for number in range(5):  # pushes out whatever can be
        record = directory.reserve(f"other.{number}", range(16), None, None, "")
        directory.publish(record.generation)
    with pytest.raises(BudgetError):
        directory.reserve("large", range(17), None, None, "")
    for scope in (None, Scope(user_id="alice"), Scope(user_id="bob")):
        assert directory.match([Wanted(TOKENS, "preamble.x", None)], scope, "").length == len(TOKENS)
