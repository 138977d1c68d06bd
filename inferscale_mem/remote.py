"""What travels between a server with our middleware and the engine that talks to it. JSON only; no HTTP here.

=================  ====================================================================================================
route              what it does
=================  ====================================================================================================
``GET info``       what is served, and a proof that the server holds the handle key
``POST requests``  token ids, sampling and a signed order in; a line of JSON for each output out
``POST facts``     announces facts, signed: which handles stand for what
=================  ====================================================================================================
"""

from __future__ import annotations

import dataclasses
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_mem import errors
from inferscale_mem.errors import EngineError, InferScaleError, InputError
from inferscale_mem.json_limits import check_json
from inferscale_mem.types import Chunk, EngineInfo, Fact, Sampling, Scope, Segment

VERSION = 1
PREFIX = "/inferscale/v1"
SIGNATURE = "x-inferscale-signature"
"""Header with the signature of a body."""

MIN_NONCE = 16


def base_of(url: str) -> str:
    """The server's address behind the ``base_url`` of an OpenAI client, which ends in ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")


# Who is served.


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself.

    Attributes:
        engine: what it runs.
        vocab_size: of the model.
        tokenizer: digest of tokenizer and chat template.
        proof: see ``prove``; "" if the caller sent no nonce.
    """

    engine: EngineInfo
    vocab_size: int
    tokenizer: str
    proof: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {"v": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, given: Any) -> ServerInfo:
        """Read it.

        Raises:
            EngineError: something else answered, or another version.
        """
        try:
            if given["v"] != VERSION:
                raise EngineError(
                    f"The server speaks version {given['v']} of the memory protocol, this package {VERSION}; "
                    "install the same release of inferscale-mem on both sides."
                )
            said = given["engine"]
            engine = EngineInfo(**{**said, "preamble": _segment(said.get("preamble"))})
            return cls(engine, int(given["vocab_size"]), str(given["tokenizer"]), str(given["proof"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The server's description of itself cannot be read: {error}") from error


def _segment(given: Any) -> Segment | None:
    return None if given is None else Segment(**{**given, "token_ids": tuple(given["token_ids"])})


def prove(key: bytes, nonce: str) -> str:
    """What only a holder of the key can answer to a nonce, and what tells nothing about the key."""
    return hmac.digest(key, b"inferscale info\0" + nonce.encode("utf-8", "replace"), "sha256").hex()


# Requests and their outputs.


def request_to_json(tokens: Sequence[int], sampling: Sampling, params: Mapping[str, Any], room: int) -> dict[str, Any]:
    """A request as it travels; what sampling leaves to defaults is left out."""
    given = {f.name: value for f in dataclasses.fields(sampling) if (value := getattr(sampling, f.name)) != f.default}
    return {"tokens": list(tokens), "sampling": given, "params": dict(params), "room": room}


def request_from_json(given: Any) -> tuple[list[int], Sampling, dict[str, Any], int]:
    """Read it.

    Raises:
        InputError: it cannot be read.
    """
    try:
        tokens, sampling, params, room = (given[name] for name in ("tokens", "sampling", "params", "room"))
        if not tokens or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
            raise InputError("tokens must be a list of token ids that is not empty")
        if type(room) is not int or room < 1 or not isinstance(params, dict):
            raise InputError("room must be a number above 0 and params an object")
        check_json(params, "params")
        stop = sampling.get("stop", ())
        return tokens, Sampling(**{**sampling, "stop": tuple(stop) if isinstance(stop, list) else stop}), params, room
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"The request cannot be read: {error}") from error


def chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    """A chunk as it travels, without its report."""
    logprobs = None if chunk.logprobs is None else [list(position.items()) for position in chunk.logprobs]
    return {"i": chunk.index, "t": chunk.text, "k": chunk.token_ids, "l": logprobs, "f": chunk.finish_reason}


def chunk_from_json(given: Mapping[str, Any]) -> Chunk:
    """Read it."""
    logprobs = given["l"]
    positions = None if logprobs is None else tuple({int(k): float(v) for k, v in position} for position in logprobs)
    return Chunk(given["i"], given["t"], tuple(given["k"]), positions, given["f"])


# Announcing facts.


@dataclass(frozen=True)
class Announcement:
    """Facts, and what their lasting handles are in one store.

    Attributes:
        store: the store's name.
        fingerprint: of the records, as it stands in their ids.
        text_tail: how many facts of a prompt are left to prefill.
        facts: lasting handle -> fact.
        free_tokens: and as many facts as fit in so many tokens, with what stands behind them.
        strict: whether the memory takes only handles that expire.
        moment: the latest drop that the announcer knew of when it looked whether the facts are there: what was dropped
            as gone later is gone.
    """

    store: str
    fingerprint: str
    text_tail: int
    facts: Mapping[str, Fact]
    free_tokens: int = 0
    strict: bool = False
    moment: int = 0

    def to_bytes(self) -> bytes:
        """As it travels."""
        facts = [[handle, f.id, f.text, f.scope.owners, f.revision] for handle, f in self.facts.items()]
        how = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "facts"}
        return json.dumps({**how, "facts": facts}).encode("ascii")

    @classmethod
    def from_bytes(cls, body: bytes) -> Announcement:
        """Read it.

        Raises:
            InputError: it cannot be read.
        """
        try:
            given = json.loads(body)
            facts = {
                str(handle): Fact(str(name), str(text), Scope.of(owners), str(revision))
                for handle, name, text, owners, revision in given["facts"]
            }
            tail, free = int(given["text_tail"]), int(given.get("free_tokens", 0))
            strict, moment = bool(given.get("strict", False)), int(given.get("moment", 0))
            return cls(str(given["store"]), str(given["fingerprint"]), tail, facts, free, strict, moment)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"The announcement cannot be read: {error}") from error


@dataclass(frozen=True)
class Announced:
    """What was made of an announcement.

    Attributes:
        missing: handles of facts that there is no record of.
        gone: handles that are not taken: they were dropped as gone, and the announcer may not have known.
        moment: of the latest drop; see ``Announcement``.
    """

    missing: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    moment: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: Any) -> Announced:
        """Read it.

        Raises:
            EngineError: it cannot be read.
        """
        try:
            missing, gone = (tuple(map(str, given[name])) for name in ("missing", "gone"))
            return cls(missing, gone, int(given["moment"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The server's answer to an announcement cannot be read: {error!r}") from error


def sign_body(body: bytes, key: bytes) -> str:
    """The signature that goes with a body."""
    return hmac.digest(key, b"inferscale body\0" + body, "sha256").hex()


def is_signed_body(body: bytes, signature: str, key: bytes) -> bool:
    """Whether the body was signed with this key; takes constant time."""
    return signature.isascii() and hmac.compare_digest(signature, sign_body(body, key))


# Errors.


def error_to_json(error: InferScaleError) -> dict[str, Any]:
    """An error as it travels."""
    return {"error": {"kind": type(error).__name__, "message": str(error)}}


def error_from_json(given: Any) -> InferScaleError | None:
    """The same error on the other side; None if this is none of ours."""
    try:
        kind, message = getattr(errors, given["error"]["kind"]), given["error"]["message"]
    except (KeyError, TypeError, AttributeError):
        return None
    if not (isinstance(kind, type) and issubclass(kind, InferScaleError)):
        return None
    simple = not any("__init__" in vars(base) for base in kind.__mro__ if issubclass(base, InferScaleError))
    return kind(message) if simple else EngineError(str(message))
