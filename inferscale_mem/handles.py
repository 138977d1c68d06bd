"""Handles: what stands for a fact outside the store, ``ism1.<id>.<tag>``.

``id`` is 80 bits of SHA-256 over the fact's id and revision, so an update makes a new handle and the old one names
nothing. ``tag`` is 80 bits of HMAC-SHA256 over version, store, owner and id, so a handle cannot be made up, nor moved
to another store or owner. Both are 16 characters of lowercase Crockford base32, which survive templates, JSON, YAML,
HTML and markdown unchanged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from inferscale_mem import memory_block
from inferscale_mem.errors import ConfigError, HandleError
from inferscale_mem.handle_key import MIN_KEY_BYTES
from inferscale_mem.handle_key import load_key as load_key
from inferscale_mem.types import Fact, Scope

VERSION = "ism1"
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base32 digits, lowercase."""

_DIGITS = f"[{ALPHABET}]{{16}}"
_HANDLE = re.compile(rf"{VERSION}\.({_DIGITS})\.({_DIGITS})")
# A letter or digit next to it, or an underscore and one, makes it part of a longer word; an escape like \\n does not.
_FOUND = re.compile(
    r"(?:(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)|(?<=\\[nrt])|(?<=\\u[0-9a-fA-F]{4}))"
    rf"{_HANDLE.pattern}(?!_?[A-Za-z0-9])"
)


@dataclass(frozen=True)
class Found:
    """A handle in a text: ``text[start:end] == handle``."""

    handle: str
    start: int
    end: int


class HandleSigner:
    """Makes and checks the handles of one store.

    Args:
        key: secret, at least 16 bytes.
        store: name of the store; handles of one store are worth nothing in another.

    Raises:
        ConfigError: the key is too short or the store has no name.
    """

    def __init__(self, key: bytes, store: str) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"The handle key has {len(key)} bytes; use at least {MIN_KEY_BYTES} random ones.")
        if not store:
            raise ConfigError("Handles need the name of their store; give one that is not empty.")
        self._key = key
        self._store = store

    @property
    def store(self) -> str:
        """Name of the store the handles belong to."""
        return self._store

    def handle_id(self, fact: Fact) -> str:
        """The handle's 16 characters for this revision of this fact."""
        return _base32(hashlib.sha256(_unambiguous(fact.id, fact.revision)).digest())

    def mint(self, fact: Fact) -> str:
        """The fact's handle."""
        identity = self.handle_id(fact)
        return f"{VERSION}.{identity}.{_tag(self._key, self._store, fact.scope, identity)}"

    def verify(self, handle: str, scope: Scope) -> bool:
        """Whether this is a handle that ``mint`` made for a fact of exactly this scope; takes constant time."""
        return verify_tag(self._key, handle, self._store, scope)


def verify_tag(key: bytes, handle: str, store: str, scope: Scope) -> bool:
    """Whether the handle's tag is right for this store and owner; takes constant time."""
    match = _HANDLE.fullmatch(handle)
    return match is not None and hmac.compare_digest(match[2], _tag(key, store, scope, match[1]))


def split(handle: str) -> tuple[str, str]:
    """The handle's id and tag.

    Raises:
        HandleError: it does not have the form of a handle.
    """
    match = _HANDLE.fullmatch(handle)
    if match is None:
        raise HandleError(f"{handle!r} is not a handle; handles look like {VERSION}.<16 characters>.<16 characters>.")
    return match[1], match[2]


def may_name(record: str, handle: str | None) -> bool:
    """Whether a record of this name can be the fact's of this handle; without one, only what is no fact's name."""
    owner = record.partition(".")[0]
    if handle is None:
        return re.fullmatch(_DIGITS, owner) is None
    match = _HANDLE.fullmatch(handle)
    return match is not None and match[1] == owner


def find(text: str) -> list[Found]:
    """Everything that has the form of a handle, in order; nothing inside longer words."""
    return [Found(match.group(), *match.span()) for match in _FOUND.finditer(text)]


def strip(text: str) -> str:
    """The text without handles, good or bad, and the bullets, quotes, … that stood there for them."""
    return memory_block.remove(text, [(found.start, found.end) for found in find(text)])


def strip_given(text: str, handles: Collection[str]) -> str:
    """The text without these handles, and what stood there for them."""
    found = find(text)
    spans = [(f.start, f.end) for f in found if f.handle in handles]
    return memory_block.remove(text, spans, [(f.start, f.end) for f in found if f.handle not in handles])


def _tag(key: bytes, store: str, scope: Scope, identity: str) -> str:
    return _base32(hmac.digest(key, _unambiguous(VERSION, store, scope.key, identity), "sha256"))


def _unambiguous(*parts: str) -> bytes:
    """No two sequences of strings give the same bytes; lone surrogates are fine."""
    return json.dumps(parts, ensure_ascii=True).encode("ascii")


def _base32(digest: bytes) -> str:
    """The first 80 bits as 16 digits."""
    number = int.from_bytes(digest[:10], "big")
    return "".join(ALPHABET[number >> shift & 31] for shift in range(75, -1, -5))
