"""The secret that signs handles: from the settings, else a file in ``home`` that is made once."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from inferscale_mem.config import InferScaleConfig, parse_handle_key
from inferscale_mem.errors import ConfigError
from inferscale_mem.private_files import make_private_folder

KEY_FILE = "handle.key"
MIN_KEY_BYTES = 16
NEW_KEY_BYTES = 32
INSTEAD = "or set INFERSCALE_HANDLE_KEY to the output of: openssl rand -hex 32"


def load_key(config: InferScaleConfig) -> bytes:
    """The handle key: ``config.handle_key``, else the one in ``home/handle.key``, which is made if there is none.

    Safe when several processes start at once: all get the same key.

    Raises:
        ConfigError: the file cannot be made or read, others may read it, or it holds no key.
    """
    if config.handle_key is not None:
        return parse_handle_key(config.handle_key)
    path = config.home / KEY_FILE
    try:
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise ConfigError(
            f"The handle key file {path} cannot be made or read ({error}). Make its folder writable, {INSTEAD}"
        ) from error


def _make(path: Path) -> None:
    """Write a new key under another name, then give it the right one: nobody ever sees half a key."""
    make_private_folder(path.parent)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(NEW_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o600)
        with contextlib.suppress(FileExistsError):  # another process was faster: its key is the key
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    with open(path, encoding="ascii", errors="replace") as file:
        mode = os.fstat(file.fileno()).st_mode
        text = file.read(4096)
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"The handle key file {path} is open to other users (mode {stat.S_IMODE(mode):04o}), so they could forge "
            f"handles. Run: chmod 600 '{path}', and if they may have read it: delete it (handles kept by apps die)."
        )
    try:
        return parse_handle_key(text)
    except ConfigError as error:
        raise ConfigError(
            f"The handle key file {path} holds no key. Restore it from a backup, or delete it to get a new key "
            f"(handles kept by apps die, facts stay), {INSTEAD}"
        ) from error
