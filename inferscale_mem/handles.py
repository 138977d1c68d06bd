"""Handles: what stands for a fact outside the store, ``ism1.<id>.<tag>``; in strict mode ``ism1.<id>.<expiry>.<tag>``.

``id`` is 80 bits of SHA-256 over the fact's id and revision, so an update makes a new handle and the old one names
nothing. ``tag`` is 80 bits of HMAC-SHA256 over version, store, owner and id, so a handle cannot be made up, nor moved
to another store or owner. Both are 16 characters of lowercase Crockford base32, which survive templates, JSON, YAML,
HTML and markdown unchanged.

The first form lasts as long as the fact's revision. Inside the package it is the only one: records are named, and
engines asked, by it. Strict mode never hands it out and never takes it back; apps are given the second, which ends at
``expiry``, ten digits of Unix seconds that the tag covers, too.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from inferscale_mem import memory_block
from inferscale_mem.errors import ConfigError, HandleError
from inferscale_mem.handle_key import MIN_KEY_BYTES
from inferscale_mem.handle_key import load_key as load_key
from inferscale_mem.types import Fact, Scope

VERSION = "ism1"
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base32 digits, lowercase."""

UNKNOWN = "unknown or no longer valid"
EXPIRED = "expired"
ENDLESS = "does not expire; only handles that do are taken here"
"""Why a handle is refused. The last two are said of genuine ones only, so that trying out handles tells nothing."""

_CACHED = 1 << 14
_TEXTS, _SHORT = 64, 1 << 14
"""Texts in which handles have been found lately are kept, short ones: so many, of so many characters at most."""
_DIGITS = f"[{ALPHABET}]{{16}}"
_LASTING = re.compile(rf"{VERSION}\.({_DIGITS})\.({_DIGITS})")
_HANDLE = re.compile(rf"{VERSION}\.({_DIGITS})\.(?:([0-9]{{10}})\.)?({_DIGITS})")
# A letter or digit next to it, or an underscore and one, makes it part of a longer word; an escape like \\n does not,
# nor another handle.
_FOUND = re.compile(
    r"(?:(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)|(?<=\\[nrt])|(?<=\\u[0-9a-fA-F]{4})"
    rf"|(?<=\.{_DIGITS})|(?<=\.{_DIGITS}_))"
    rf"{_HANDLE.pattern}(?:(?=_?{VERSION}\.)|(?!_?[A-Za-z0-9]))"
)
_BROKEN = re.compile(rf"{VERSION}\.[A-Za-z0-9.]{{8,48}}")


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
        expire_after_s: strict mode: handles that are handed out end after so many seconds, and others are refused.
        clock: the time in Unix seconds.

    Raises:
        ConfigError: the key is too short or the store has no name.
    """

    def __init__(
        self, key: bytes, store: str, expire_after_s: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"The handle key has {len(key)} bytes; use at least {MIN_KEY_BYTES} random ones.")
        if not store:
            raise ConfigError("Handles need the name of their store; give one that is not empty.")
        self._key = key
        self._store = store
        self._expire_after_s = expire_after_s
        self.clock = clock

    @property
    def strict(self) -> bool:
        """Whether only handles that expire are handed out and taken."""
        return self._expire_after_s is not None

    @property
    def store(self) -> str:
        """Name of the store the handles belong to."""
        return self._store

    def handle_id(self, fact: Fact) -> str:
        """The handle's 16 characters for this revision of this fact."""
        return _identity(fact.id, fact.revision)

    def mint(self, fact: Fact) -> str:
        """The fact's lasting handle: its name inside. Apps are given what ``issue`` makes."""
        identity = self.handle_id(fact)
        return f"{VERSION}.{identity}.{_tag(self._key, self._store, fact.scope, identity)}"

    def issue(self, fact: Fact) -> str:
        """A handle of the fact to hand out: in strict mode one that expires, else the lasting one."""
        if self._expire_after_s is None:
            return self.mint(fact)
        identity = self.handle_id(fact)
        expiry = f"{math.ceil(self.clock()) + self._expire_after_s:010}"
        return f"{VERSION}.{identity}.{expiry}.{_tag(self._key, self._store, fact.scope, identity, expiry)}"

    def refusal(self, handle: str, scope: Scope) -> str | None:
        """Why a handle is not taken for a fact of exactly this scope; None if it is."""
        return refusal(self._key, handle, self._store, scope, now=self.clock(), strict=self.strict)

    def verify(self, handle: str, scope: Scope) -> bool:
        """Whether ``issue`` made this handle for a fact of exactly this scope, and it may still be used."""
        return self.refusal(handle, scope) is None


def refusal(key: bytes, handle: str, store: str, scope: Scope, *, now: float, strict: bool) -> str | None:
    """Why a handle, of either form, is not taken for a fact of this store and owner; None if it is.

    The tag is compared in constant time.

    Args:
        now: Unix seconds; a handle is taken as long as this is less than its expiry.
        strict: whether it must be one that expires.
    """
    match = _HANDLE.fullmatch(handle)
    if match is None:
        return UNKNOWN
    identity, expiry, tag = match.groups()
    signed = (identity,) if expiry is None else (identity, expiry)
    if not hmac.compare_digest(tag, _tag(key, store, scope, *signed)):
        return UNKNOWN
    if expiry is None:
        return ENDLESS if strict else None
    return None if now < int(expiry) else EXPIRED


def verify_tag(key: bytes, handle: str, store: str, scope: Scope) -> bool:
    """Whether this is the lasting handle of a fact of this store and owner; takes constant time."""
    match = _LASTING.fullmatch(handle)
    return match is not None and hmac.compare_digest(match[2], _tag(key, store, scope, match[1]))


def split(handle: str) -> tuple[str, str]:
    """The handle's id and tag, in either form.

    Raises:
        HandleError: it does not have the form of a handle.
    """
    match = _HANDLE.fullmatch(handle)
    if match is None:
        raise HandleError(f"{handle!r} is not a handle; handles look like {VERSION}.<16 characters>.<16 characters>.")
    return match[1], match[3]


def check_lasting(handle: str) -> None:
    """Whether a handle is of the form that records are named after.

    Raises:
        HandleError: it is not.
    """
    if _LASTING.fullmatch(handle) is None:
        raise HandleError(
            f"{handle!r} names no record; give the fact, or the handle that HandleSigner.mint makes of it."
        )


def may_name(record: str, handle: str | None) -> bool:
    """Whether a record of this name can be that of this lasting handle; without one, only what is no fact's name."""
    owner = record.partition(".")[0]
    if handle is None:
        return re.fullmatch(_DIGITS, owner) is None
    match = _LASTING.fullmatch(handle)
    return match is not None and match[1] == owner


def find(text: str) -> list[Found]:
    """Everything that has the form of a handle, in order; nothing inside longer words."""
    if VERSION not in text:  # most texts; the pattern looks at every character
        return []
    return [*(_found if len(text) <= _SHORT else _found.__wrapped__)(text)]


def find_broken(text: str) -> list[str]:
    """What was a handle once, as it seems: cut off, mistyped, inside a longer word. No more of it than a handle has."""
    if VERSION not in text:
        return []
    whole = find(text)
    left = [
        text[one.end : two.start] for one, two in itertools.pairwise([Found("", 0, 0), *whole, Found("", len(text), 0)])
    ]
    return [match.group().rstrip(".") for part in left for match in _BROKEN.finditer(part)]


def strip(text: str) -> str:
    """The text without handles, good or bad, and the bullets, quotes, … that stood there for them."""
    return memory_block.remove(text, [(found.start, found.end) for found in find(text)])


def strip_given(text: str, handles: Collection[str]) -> str:
    """The text without these handles, and what stood there for them."""
    found = find(text)
    spans = [(f.start, f.end) for f in found if f.handle in handles]
    return memory_block.remove(text, spans, [(f.start, f.end) for f in found if f.handle not in handles])


# Cached: a query looks for the handles of its 50 facts seven times in the same message, and signs and checks each of
# them four times: three milliseconds and more.


@lru_cache(maxsize=_TEXTS)
def _found(text: str) -> tuple[Found, ...]:
    return tuple(Found(match.group(), *match.span()) for match in _FOUND.finditer(text))


@lru_cache(maxsize=_CACHED)
def _identity(fact_id: str, revision: str) -> str:
    return _base32(hashlib.sha256(_unambiguous(fact_id, revision)).digest())


@lru_cache(maxsize=_CACHED)
def _tag(key: bytes, store: str, scope: Scope, *signed: str) -> str:
    return _base32(hmac.digest(key, _unambiguous(VERSION, store, scope.key, *signed), "sha256"))


def _unambiguous(*parts: str) -> bytes:
    """No two sequences of strings give the same bytes; lone surrogates are fine."""
    return json.dumps(parts, ensure_ascii=True).encode("ascii")


def _base32(digest: bytes) -> str:
    """The first 80 bits as 16 digits."""
    number = int.from_bytes(digest[:10], "big")
    return "".join(ALPHABET[number >> shift & 31] for shift in range(75, -1, -5))
