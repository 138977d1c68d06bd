"""Settings. The only file that reads the environment.

========================  ==========================================================  ===============
variable                  meaning                                                     setting
========================  ==========================================================  ===============
``INFERSCALE_MODEL``      Hugging Face id or local path of the chat model             ``model``
``INFERSCALE_EMBEDDER``   Hugging Face id or local path of the embedding model        ``embedder``
``INFERSCALE_ENGINE``     ``vllm``, ``transformers`` or ``server``                      ``engine.kind``
``INFERSCALE_BASE_URL``   URL of an ``inferscale-mem serve``, e.g. http://host:8000/v1  ``engine.base_url``
``INFERSCALE_API_KEY``    what that server was given as ``--api-key``                   ``engine.api_key``
``INFERSCALE_HOME``       folder for facts, the handle key and converted models       ``home``
``INFERSCALE_HANDLE_KEY`` at least 32 hex digits: signs handles instead of a key file ``handle_key``
========================  ==========================================================  ===============

What is given in code wins over the environment, the environment over the defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from inferscale_mem.errors import ConfigError

MEGABYTE = 1 << 20
AUTO = "auto"
RECORD_DTYPES = (AUTO, "int8")
"""How records are stored: as in the KV cache, or in 8 bits and a scale for each head of each token."""


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. Two equal ones share one engine in a process.

    Attributes:
        kind: "vllm", "transformers" for machines without vLLM, or "server".
        base_url: of a server that ``inferscale-mem serve`` started; makes ``kind`` "server". What follows from
            ``multiprocess`` on is then the server's affair, ``connector`` excepted.
        api_key: what the server was given as --api-key.
        timeout: seconds to wait for the server to say something.
        retries: how often a request that did not get through to the server is sent again.
        multiprocess: run vLLM's core in a process of its own (vLLM's default); False keeps it in this one.
        max_model_len: tokens of prompt and answer together; None takes what the model was trained for.
        dtype: of weights and KV; "auto" takes the checkpoint's, on CPUs with AVX2 and no AVX512 float32.
        kv_cache_bytes: paged cache; None lets the engine decide from free memory (on CPU: 1 GiB).
        record_bytes: slab for records, per rank.
        record_dtype: how records are stored: "auto" as in the paged cache, "int8" in about half of bfloat16's room.
        preamble: file that ``inferscale-mem train`` made for this model: facts are encoded behind it. None: behind the
            prompt's header.
        block_size: tokens per block of the paged cache; None takes the engine's default.
        enforce_eager: skip compilation: starts faster, runs slower. None: eager on CPU, compiled on a GPU.
        prefix_caching: the engine's own cache of plain prefixes.
        connector: False serves memories as plain text only.
        self_test: compare injected with plain answers at start.
        max_batched_tokens: per engine step; None takes the engine's default.
        extra: further arguments of vLLM's AsyncEngineArgs, as (name, value) pairs.
    """

    kind: Literal["vllm", "transformers", "server"] = "vllm"
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 300.0
    retries: int = 3
    multiprocess: bool = True
    max_model_len: int | None = None
    dtype: str = "auto"
    kv_cache_bytes: int | None = None
    record_bytes: int = 1024 * MEGABYTE
    record_dtype: str = AUTO
    preamble: str | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None
    prefix_caching: bool = True
    connector: bool = True
    self_test: bool = True
    max_batched_tokens: int | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("vllm", "transformers", "server"):
            raise ConfigError(f"engine.kind={self.kind!r} is not known; use 'vllm', 'transformers' or 'server'.")
        self._check_server()
        for name in ("max_model_len", "kv_cache_bytes", "record_bytes", "block_size", "max_batched_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
                raise ConfigError(f"engine.{name}={value!r} must be a positive whole number.")
        for name in ("multiprocess", "prefix_caching", "connector", "self_test"):
            _check_kind(f"engine.{name}", getattr(self, name), bool, "True or False")
        _check_kind("engine.enforce_eager", self.enforce_eager, bool | None, "True, False or None")
        _check_kind("engine.dtype", self.dtype, str, "text")
        _check_kind("engine.preamble", self.preamble, str | None, "the path of a file")
        if self.record_dtype not in RECORD_DTYPES:
            raise ConfigError(f"engine.record_dtype={self.record_dtype!r} is not known; use 'auto' or 'int8'.")
        if not isinstance(self.extra, tuple) or any(
            not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in self.extra
        ):
            raise ConfigError(f"engine.extra={self.extra!r} must be a mapping, or a tuple of (name, value) pairs.")

    def _check_server(self) -> None:
        _check_kind("engine.base_url", self.base_url, str | None, "a URL")
        _check_kind("engine.api_key", self.api_key, str | None, "text", show=False)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError(
                "engine.api_key holds characters that no HTTP header may have; is there a line break at its end?"
            )
        _check_kind("engine.timeout", self.timeout, int | float, "seconds")
        _check_kind("engine.retries", self.retries, int, "a whole number")
        if self.base_url is None:
            if self.kind == "server":
                raise ConfigError("engine.kind='server' needs engine.base_url, e.g. 'http://localhost:8000/v1'.")
            return
        if not is_http_url(self.base_url):
            raise ConfigError(f"engine.base_url={self.base_url!r} must be like http://host:8000/v1, or with https://.")
        if not self.timeout > 0 or self.retries < 0:
            raise ConfigError("engine.timeout must be more than 0, engine.retries 0 or more.")
        if self.preamble is not None:
            raise ConfigError("A preamble is the server's: start it with `inferscale-mem serve --preamble FILE`.")
        if self.kind == "transformers":
            raise ConfigError("engine.kind='transformers' runs in this process; leave out engine.base_url.")
        object.__setattr__(self, "kind", "server")


@dataclass(frozen=True)
class EncodingConfig:
    """What facts are encoded behind, and how they are served.

    Attributes:
        policy: as ``encoding.parse_policy`` takes it, e.g. "fact_chain(8, nearest)".
        text_tail: leave the last n facts (the most similar) to ordinary prefill with the question. "auto": as many as
            the engine prefills at no measurable cost, which is measured at its start.
        max_fact_tokens: longer facts are refused; None: a quarter of the model's context.
    """

    policy: str = "fact_chain(8, nearest)"
    text_tail: int | Literal["auto"] = 0
    max_fact_tokens: int | None = None

    def __post_init__(self) -> None:
        tail = self.text_tail
        if tail != "auto" and (not isinstance(tail, int) or isinstance(tail, bool) or tail < 0):
            raise ConfigError(f"encoding.text_tail={tail!r} must be a whole number, 0 or more, or 'auto'.")
        most = self.max_fact_tokens
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most <= 0):
            raise ConfigError(f"encoding.max_fact_tokens={most!r} must be a positive whole number.")


LONGEST_EXPIRY_S = 100 * 365 * 86400


@dataclass(frozen=True)
class HandlesConfig:
    """How long handles are worth something.

    Attributes:
        expire_after_s: seconds after which a handle that was handed out is refused (strict mode: handles that do not
            expire are then refused, too). None: as long as the fact stays as it is.
    """

    expire_after_s: int | None = None

    def __post_init__(self) -> None:
        after = self.expire_after_s
        if after is None:
            return
        if not isinstance(after, int) or isinstance(after, bool) or not 1 <= after <= LONGEST_EXPIRY_S:
            raise ConfigError(
                f"handles.expire_after_s={after!r} must be a whole number of seconds, from 1 to {LONGEST_EXPIRY_S} "
                "(100 years); leave it out for handles that do not expire."
            )


@dataclass(frozen=True)
class InferScaleConfig:
    """All settings of this package.

    Attributes:
        model: Hugging Face id or local path; None takes the packaged small chat model.
        embedder: likewise for embeddings; None takes the packaged MiniLM.
        home: folder for facts, key and converted models.
        handle_key: hex digits that sign handles; None uses a key file in ``home``, made once.
        engine: how the engine runs.
        encoding: what facts are encoded behind.
        handles: how long they are worth something.
    """

    model: str | None = None
    embedder: str | None = None
    home: Path = Path("~/.inferscale")
    handle_key: str | None = field(default=None, repr=False)
    engine: EngineConfig = field(default_factory=EngineConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    handles: HandlesConfig = field(default_factory=HandlesConfig)

    def __post_init__(self) -> None:
        for name in ("model", "embedder"):
            _check_kind(name, getattr(self, name), str | os.PathLike | None, "a Hugging Face id or a path")
        _check_kind("home", self.home, str | os.PathLike, "a path")
        _check_kind("handle_key", self.handle_key, str | None, "hex digits", show=False)
        _check_kind("engine", self.engine, EngineConfig, "an EngineConfig or a mapping of its settings")
        _check_kind("encoding", self.encoding, EncodingConfig, "an EncodingConfig or a mapping of its settings")
        _check_kind("handles", self.handles, HandlesConfig, "a HandlesConfig or a mapping of its settings")
        if not str(self.home).strip():
            raise ConfigError("home is empty; name a folder, or leave it out to take the default.")
        object.__setattr__(self, "home", Path(self.home).expanduser())
        if self.handle_key is not None:
            parse_handle_key(self.handle_key)

    @classmethod
    def from_env(cls, settings: Mapping[str, Any] | None = None) -> InferScaleConfig:
        """Settings from a (nested) mapping, then the environment, then the defaults.

        Raises:
            ConfigError: an unknown key or a value of the wrong kind.
        """
        given = dict(settings or {})
        from_env = {
            "model": os.environ.get("INFERSCALE_MODEL"),
            "embedder": os.environ.get("INFERSCALE_EMBEDDER"),
            "home": os.environ.get("INFERSCALE_HOME"),
            "handle_key": os.environ.get("INFERSCALE_HANDLE_KEY"),
        }
        for name, value in from_env.items():
            if value and given.get(name) is None:
                given[name] = value
        engine = given.get("engine") or {}
        if isinstance(engine, Mapping):
            engine = dict(engine)
            for name in ("kind", "base_url", "api_key"):
                variable = "INFERSCALE_ENGINE" if name == "kind" else f"INFERSCALE_{name.upper()}"
                if (value := os.environ.get(variable)) and engine.get(name) is None:
                    engine[name] = value
            if isinstance(engine.get("extra"), Mapping):
                engine["extra"] = tuple(sorted(engine["extra"].items()))
            given["engine"] = _build(EngineConfig, engine, "engine.")
        for name, kind in (("encoding", EncodingConfig), ("handles", HandlesConfig)):
            if isinstance(settings_of := given.get(name) or {}, Mapping):
                given[name] = _build(kind, settings_of, f"{name}.")
        built: InferScaleConfig = _build(cls, given, "")
        return built


@contextlib.contextmanager
def vllm_multiprocessing(on: bool) -> Iterator[None]:
    """vLLM reads from the environment whether its core runs in a process of its own; set it for a block."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _build(kind: type[Any], settings: Mapping[str, Any], prefix: str) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(str(name) for name in settings if name not in known)
    if unknown:
        raise ConfigError(
            f"Unknown setting {prefix}{unknown[0]}; known are: {', '.join(prefix + name for name in sorted(known))}."
        )
    return kind(**{name: value for name, value in settings.items() if value is not None})


def is_http_url(text: str) -> bool:
    """Whether a text is a URL with a host."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_kind(name: str, value: object, kind: Any, words: str, *, show: bool = True) -> None:
    is_switch = isinstance(value, bool)  # which Python takes for a number
    if not isinstance(value, kind) or (is_switch and bool not in (kind, *get_args(kind))):
        given = f"{name}={value!r}" if show else name
        raise ConfigError(f"{given} must be {words}, not {type(value).__name__}.")


def parse_handle_key(text: str) -> bytes:
    """The key behind its hex digits.

    Raises:
        ConfigError: not hex, or shorter than 128 bits.
    """
    try:
        key = bytes.fromhex(text.strip())
    except ValueError as error:
        raise ConfigError("The handle key is not hex digits; make one with: openssl rand -hex 32") from error
    if len(key) < 16:
        raise ConfigError("The handle key is shorter than 128 bits; make one with: openssl rand -hex 32")
    return key
