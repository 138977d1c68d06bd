"""Files and folders that only their owner can read: what people say is nobody else's business."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing; one that is there stays as it is.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            with contextlib.suppress(FileExistsError):  # by another process
                folder.mkdir(mode=0o700)
    path.mkdir(exist_ok=True)  # says what is wrong, if anything is


def make_private_file(path: Path) -> None:
    """Make an empty file, for a library that would make one that all can read; one that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
