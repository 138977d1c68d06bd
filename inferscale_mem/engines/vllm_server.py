"""The engine on a server: vLLM's own, with our connector and middleware (``inferscale-mem serve``). No vLLM here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import httpx

from inferscale_mem import remote
from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.over_requests import Output, RequestEngine, Requests
from inferscale_mem.errors import ConfigError, EngineAwayError, EngineClosedError, EngineError, ModelError
from inferscale_mem.tokenizer import load_tokenizer
from inferscale_mem.types import Sampling

logger = logging.getLogger(__name__)

FIRST_WAIT = 0.2
"""Seconds before the second attempt to connect; doubles with each further one."""
CONNECTIONS = 128
_NEVER_ARRIVED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_AWAY = (502, 503, 504)
"""What a server that is not ready answers, or a proxy in front of it."""
_CUT_OFF = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""Errors of a pooled connection that the server has closed meanwhile, if they come before any byte of an answer."""


class VllmServerEngine(RequestEngine):
    """``protocols.Engine`` over HTTP. Requests that did not get through are sent again, later and later.

    Args:
        model: of the tokenizer: a local folder or Hugging Face id; must be the one that the server serves. Or what
            finds it, which may take long: called once the server has answered.
        config: ``base_url``, ``api_key``, ``timeout`` and ``retries`` are looked at, and ``connector``.
        key: signs handles and orders; must be the server's.

    Raises:
        ConfigError: the URL, the API key or the handle key is not the server's.
        ModelError: the server serves another model.
        EngineAwayError: no server answers.
        EngineError: one without the connector does.
    """

    def __init__(self, model: str | Callable[[], str], config: EngineConfig, key: bytes | None = None) -> None:
        super().__init__("inferscale-server")
        self._requests = Requests(self._run, key)
        self._config, self._key = config, key
        self._base = remote.base_of(str(config.base_url))
        try:
            nonce = secrets.token_hex(remote.MIN_NONCE)
            found = self._submit(self._start(nonce)).result()
            model = model() if callable(model) else model
            self._tokenizer = load_tokenizer(model)
            self._check(found, model, nonce)
        except BaseException:
            self.close()
            raise

    async def _start(self, nonce: str) -> remote.ServerInfo:
        headers = {"authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        timeout = httpx.Timeout(self._config.timeout)
        self._http = httpx.AsyncClient(base_url=self._base, headers=headers, limits=limits, timeout=timeout)
        found = remote.ServerInfo.from_json(await self._get(f"{remote.PREFIX}/info?nonce={nonce}"))
        self._vocab_size = found.vocab_size
        self._info = found.engine
        if not self._config.connector:
            self._info = dataclasses.replace(found.engine, connector=False)
        return found

    def _check(self, found: remote.ServerInfo, model: str, nonce: str) -> None:
        if found.tokenizer != self._tokenizer.digest:
            raise ModelError(
                f"The server at {self._base} serves {found.engine.model!r}, whose tokenizer or chat template is "
                f"not that of {model!r}. Give model= the model that the server was started with."
            )
        if not self._config.connector:
            return
        if self._key is None or found.proof != remote.prove(self._key, nonce):
            raise ConfigError(
                f"The handle key here is not that of the server at {self._base}. Set INFERSCALE_HANDLE_KEY (or "
                "handle_key=) on both sides to the output of one `openssl rand -hex 32`, or copy the server's key file."
            )

    # One request.

    async def _run(
        self, tokens: list[int], sampling: Sampling, params: dict[str, Any], room: int
    ) -> AsyncGenerator[Output, None]:
        body = json.dumps(remote.request_to_json(tokens, sampling, params, room)).encode("ascii")
        complete = False
        async with self._sent("POST", f"{remote.PREFIX}/requests", body) as response:
            try:
                async for line in response.aiter_lines():
                    given = json.loads(line)
                    if error := remote.error_from_json(given):
                        raise error
                    complete = given.get("end", False)
                    chunks = tuple(map(remote.chunk_from_json, given["chunks"]))
                    yield Output(chunks, given.get("answer"), given.get("cached"))
            except httpx.HTTPError as error:
                raise self._broken(error) from error
        if not complete:
            raise EngineError(f"The server at {self._base} broke off in the middle of an answer; ask again.")

    def announce(self, announcement: remote.Announcement) -> remote.Announced:
        """See protocols.Engine."""
        return self._submit(self._announce(announcement)).result() if self._info.connector else remote.Announced()

    async def _announce(self, announcement: remote.Announcement) -> remote.Announced:
        body = announcement.to_bytes()
        signature = remote.sign_body(body, self._key or b"")
        async with self._sent("POST", f"{remote.PREFIX}/facts", body, {remote.SIGNATURE: signature}) as response:
            return remote.Announced.from_json(json.loads(await response.aread()))

    async def _get(self, path: str) -> Any:
        async with self._sent("GET", path) as response:
            try:
                return json.loads(await response.aread())
            except ValueError as error:
                raise EngineError(f"{self._base} does not answer in JSON; is it an inferscale-mem server?") from error

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[httpx.Response, None]:
        """A good response, its body still to come."""
        response = await self._send(method, path, body, {"content-type": "application/json", **(headers or {})})
        try:
            if response.status_code != 200:
                await self._refuse(response)
            yield response
        finally:
            await response.aclose()

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        wait = FIRST_WAIT
        for attempt in range(self._config.retries + 1):
            try:
                request = self._http.build_request(method, path, content=body, headers=dict(headers))
                response = await self._http.send(request, stream=True)
            except (*_NEVER_ARRIVED, *_CUT_OFF) as error:
                if attempt == self._config.retries:
                    raise self._broken(error) from error
            except httpx.HTTPError as error:
                raise self._broken(error) from error
            else:
                if response.status_code != 503 or attempt == self._config.retries:
                    return response
                await response.aclose()
            await asyncio.sleep(wait * (1 + secrets.randbelow(100) / 200))
            wait *= 2
        raise AssertionError("every attempt ends above")

    async def _refuse(self, response: httpx.Response) -> None:
        """Raise what a bad answer means."""
        body = await response.aread()
        try:
            error = remote.error_from_json(json.loads(body))
        except ValueError:
            error = None
        if error is not None:
            raise error
        if response.status_code == 401:
            raise ConfigError(f"The server at {self._base} wants another API key; give engine.api_key.")
        if response.status_code in (404, 405):
            raise EngineError(
                f"The server at {self._base} runs without the memory middleware: memories sent to it would be ignored, "
                "silently. Start it with `inferscale-mem serve`, or with the options that docs/server.md lists."
            )
        kind = EngineAwayError if response.status_code in _AWAY else EngineError
        raise kind(f"The server at {self._base} answered {response.status_code}: {body[:300]!r}")

    def _broken(self, error: httpx.HTTPError) -> EngineError:
        if self._closed:
            return EngineClosedError("The engine was closed while it worked on this; open a new one.")
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return EngineError(
                f"The server at {self._base} did not answer within {self._config.timeout:g} s; raise engine.timeout "
                "if it is merely busy."
            )
        what = error or type(error).__name__
        return EngineAwayError(f"No server at {self._base} ({what}). Is it running, and ready?")

    async def _close(self) -> None:
        if hasattr(self, "_http"):
            await self._http.aclose()
