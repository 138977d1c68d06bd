from __future__ import annotations

import multiprocessing
import os
import stat
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError
from inferscale_mem.handle_key import KEY_FILE, load_key

posix = pytest.mark.skipif(os.name != "posix", reason="modes are a POSIX matter")


def test_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "not" / "there"
    key = load_key(InferScaleConfig(home=home))
    assert len(key) == 32
    assert load_key(InferScaleConfig(home=home)) == key
    assert [path.name for path in home.iterdir()] == [KEY_FILE]
    assert load_key(InferScaleConfig(home=tmp_path / "other")) != key


@posix
def test_modes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = os.umask(0)
    try:
        load_key(InferScaleConfig(home=home))
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / KEY_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_key_in_the_settings_needs_no_file(tmp_path: Path) -> None:
    assert load_key(InferScaleConfig(home=tmp_path / "home", handle_key="ab" * 16)) == b"\xab" * 16
    assert not (tmp_path / "home").exists()


def _load(home: Path, barrier: Barrier, keys: multiprocessing.Queue[bytes]) -> None:
    barrier.wait(30)
    keys.put(load_key(InferScaleConfig(home=home)))


def test_processes_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, keys = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_load, args=(tmp_path, barrier, keys)) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = {keys.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(30)
    assert len(found) == 1
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_a_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking for the file and making it, another process makes it."""
    link = os.link
    theirs = "cd" * 32

    def late(source: str, target: Path) -> None:
        target.touch(mode=0o600)
        target.write_text(theirs)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert load_key(InferScaleConfig(home=tmp_path)) == bytes.fromhex(theirs)


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_open_to_others(tmp_path: Path, mode: int) -> None:
    load_key(InferScaleConfig(home=tmp_path))
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key(InferScaleConfig(home=tmp_path))


@pytest.mark.parametrize("content", ["", "not hex", "abcd", "é" * 40])
def test_malformed(tmp_path: Path, content: str) -> None:
    load_key(InferScaleConfig(home=tmp_path))
    (tmp_path / KEY_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"Restore it from a backup.*INFERSCALE_HANDLE_KEY"):
        load_key(InferScaleConfig(home=tmp_path))


def test_no_place_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made or read") as caught:
        load_key(InferScaleConfig(home=tmp_path / "file"))
    assert isinstance(caught.value.__cause__, OSError)
