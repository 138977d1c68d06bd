"""Checksums of a folder: what counts as damage, and what does not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from inferscale_mem.models.checksums import MANIFEST, Manifest, damage

SOURCE = {"package": "p", "version": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "weights").write_bytes(os.urandom(1000))
    (made / "config.json").write_text("{}", encoding="utf-8")
    Manifest.of(made, SOURCE).write(made)
    return made


def same_time(path: Path, content: bytes) -> None:
    """Change a file behind the back of its times."""
    state = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_a_good_folder_has_no_damage(folder: Path) -> None:
    assert damage(folder, SOURCE) is None
    assert damage(folder, SOURCE, full=True) is None


def test_what_is_written_is_read_back(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest == Manifest.of(folder, SOURCE)
    assert manifest is not None and set(manifest.files) == {"weights", "config.json"}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("content", "told"), [(b"x" * 999, "999 bytes instead of 1000"), (b"x" * 1000, "other content")]
)
def test_changed_files_are_found(folder: Path, content: bytes, told: str) -> None:
    (folder / "weights").write_bytes(content)
    os.utime(folder / "weights", ns=(0, 0))
    assert told in (damage(folder, SOURCE) or "")


def test_a_change_that_keeps_size_and_time_needs_the_full_check(folder: Path) -> None:
    same_time(folder / "weights", b"x" * 1000)
    assert damage(folder, SOURCE) is None
    assert "weights has other content" in (damage(folder, SOURCE, full=True) or "")


def test_missing_files_are_found(folder: Path) -> None:
    (folder / "weights").unlink()
    assert damage(folder, SOURCE) == "weights is missing"
    assert damage(folder.with_name("elsewhere"), SOURCE) == "it does not exist"


def test_another_source_is_damage(folder: Path) -> None:
    assert "another version" in (damage(folder, {**SOURCE, "version": "2"}) or "")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"source": {}, "files": {"a": {}}}', '{"source": 1, "files": []}'])
def test_an_unreadable_manifest_is_damage(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    assert MANIFEST in (damage(folder, SOURCE) or "")


def test_a_copy_is_good_and_its_times_are_noted(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copy)
    os.utime(copy / "weights", ns=(0, 0))
    assert damage(copy, SOURCE) is None
    noted = Manifest.read(copy)
    assert noted is not None and noted.files["weights"].mtime_ns == 0
