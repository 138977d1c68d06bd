"""A folder of files with a manifest of their checksums: tells a good copy from a broken one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "inferscale-manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """What one file was when the manifest was written.

    Attributes:
        size: bytes.
        mtime_ns: time of last change, nanoseconds; only a hint that a full check can be skipped.
        sha256: hex digits.
    """

    size: int
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Read the whole file."""
        state = path.stat()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(size=state.st_size, mtime_ns=state.st_mtime_ns, sha256=digest)


@dataclass(frozen=True)
class Manifest:
    """Where a folder's files came from, and what they are.

    Attributes:
        source: what they were made from and by which recipe; equal sources make equal files.
        files: file name -> entry; names are relative to the folder.
    """

    source: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @classmethod
    def of(cls, folder: Path, source: Mapping[str, Any]) -> Manifest:
        """Checksum every file of the folder."""
        names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
        return cls(source=dict(source), files={name: FileEntry.of(folder / name) for name in names})

    def write(self, folder: Path) -> None:
        """Put the manifest into the folder, atomically."""
        draft = folder / f".{MANIFEST}.{os.getpid()}"
        entries = {name: dataclasses.asdict(entry) for name, entry in self.files.items()}
        draft.write_text(json.dumps({"source": dict(self.source), "files": entries}, indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The folder's manifest; None if there is none or it cannot be understood."""
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            return cls(source=dict(content["source"]), files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def damage(folder: Path, source: Mapping[str, Any], *, full: bool = False) -> str | None:
    """What is wrong with the folder, in words; None if it is as the manifest says and made from ``source``.

    Sizes are always compared. Content is compared where a file's time has changed, or everywhere if ``full``. When only
    times differ (a copied or restored folder), they are noted, so that the next check is quick again.
    """
    if not folder.is_dir():
        return "it does not exist"
    manifest = Manifest.read(folder)
    if manifest is None:
        return f"{MANIFEST} is missing or unreadable"
    if manifest.source != dict(source):
        return "it was made from another version of its source"
    touched = False
    for name, entry in manifest.files.items():
        try:
            state = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if state.st_size != entry.size:
            return f"{name} has {state.st_size} bytes instead of {entry.size}"
        moved = state.st_mtime_ns != entry.mtime_ns
        if (full or moved) and FileEntry.of(folder / name).sha256 != entry.sha256:
            return f"{name} has other content than when it was made"
        touched = touched or moved
    if touched and os.access(folder, os.W_OK):
        Manifest.of(folder, source).write(folder)
    return None
