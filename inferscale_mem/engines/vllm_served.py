"""The engine behind vLLM's own server, for code that runs in the server's process, on its event loop."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm import envs
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.engine.exceptions import EngineDeadError

from inferscale_mem import wire
from inferscale_mem.engines.over_requests import Output, Requests
from inferscale_mem.engines.requests import check_request
from inferscale_mem.engines.self_test import TOP, run_self_test
from inferscale_mem.engines.serve_options import CONNECTOR, NO_CONNECTOR, ONE_PROCESS
from inferscale_mem.engines.vllm_requests import engine_info, read_outputs, sampling_params
from inferscale_mem.errors import ConfigError, EngineError, UnsupportedModelError
from inferscale_mem.kv.connector import read_key
from inferscale_mem.kv.preamble import Preamble
from inferscale_mem.tokenizer import HFChatTokenizer, load_tokenizer
from inferscale_mem.types import EncodePlan, EncodeReport, EngineInfo, Sampling


@dataclass
class Overheard:
    """What the engine said about a request that went through vLLM's own handlers: their streams leave it out.

    Attributes:
        ticket: of its order.
        started: when the request was handed on.
        ttft_ms: milliseconds to its first token.
        answer: the connector's.
    """

    ticket: str
    started: float = field(default_factory=time.perf_counter)
    ttft_ms: float | None = None
    answer: Mapping[str, Any] | None = None


_listening: ContextVar[Overheard | None] = ContextVar("inferscale_listening", default=None)


@contextlib.contextmanager
def overhear(ticket: str) -> Any:
    """While the block runs, the request that vLLM's handlers make in its context, with this ticket, is overheard."""
    heard = Overheard(ticket)
    token = _listening.set(heard)
    try:
        yield heard
    finally:
        _listening.reset(token)


class ServedEngine:
    """The engine of a running server.

    Args:
        state: of the server's FastAPI app, once it is complete.
    """

    def __init__(self, state: Any) -> None:
        self._args, self._client = state.args, state.engine_client
        self._vllm_config = self._client.vllm_config
        self.key = self._find_key()
        self.requests = Requests(self.run, self.key)
        model_config = self._vllm_config.model_config
        self._defaults = model_config.get_diff_sampling_param()
        self.vocab_size: int = model_config.get_vocab_size()
        self.tokenizer: HFChatTokenizer = load_tokenizer(model_config.tokenizer)
        if template := load_chat_template(self._args.chat_template):
            self.tokenizer.hf.chat_template = template
        self.template_kwargs: dict[str, Any] = dict(getattr(self._args, "default_chat_template_kwargs", None) or {})
        self.info: EngineInfo

    def _find_key(self) -> bytes:
        transfer = self._vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            raise ConfigError(NO_CONNECTOR)
        processes = getattr(self._args, "api_server_count", None) or 1
        if processes > 1 or self._vllm_config.parallel_config.data_parallel_size > 1:
            raise ConfigError(ONE_PROCESS)
        key = read_key(transfer.kv_connector_extra_config)
        if key is None:
            raise ConfigError(
                "A server needs handle_key_file in kv_connector_extra_config; unsigned_orders is no option."
            )
        return key

    async def start(self) -> None:
        """Find out whether the model can be used, and whether injection is exact here.

        Raises:
            UnsupportedModelError: its KV cannot be stored and moved; every reason is listed.
            SelfTestError: injected answers differ from plain ones.
        """
        status = await self.requests.ask(wire.status_params())
        model = self._vllm_config.model_config.model
        if status["unsupported"]:
            raise UnsupportedModelError(model, status["unsupported"])
        self.info = engine_info(model, self._vllm_config, status)
        extra = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        if extra.get("preamble"):
            Preamble.open(extra["preamble"]).check(self.tokenizer.digest)
        if extra.get("self_test", True):
            most = self._vllm_config.model_config.max_logprobs
            top = TOP if most < 0 else min(TOP, most)
            await run_self_test(self.info, self.vocab_size, self.requests.ask, self.requests.logprobs, top=top)
        self._listen()

    def _listen(self) -> None:
        """Have every request of vLLM's own handlers overheard, where somebody wants to."""
        generate = self._client.generate

        async def heard_generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            heard = _listening.get()
            async with contextlib.aclosing(generate(*args, **kwargs)) as outputs:
                async for output in outputs:
                    if heard is not None:
                        heard.answer = wire.read_answer(output.kv_transfer_params) or heard.answer
                        if heard.ttft_ms is None:
                            heard.ttft_ms = 1000 * (time.perf_counter() - heard.started)
                    yield output
            if heard is not None and heard.ticket and heard.answer is None:  # a stop string ended it
                ticket, heard.ticket = heard.ticket, ""  # asking is a request, too
                heard.answer = await self.requests.report(ticket)

        self._client.generate = heard_generate

    async def run(
        self, tokens: list[int], sampling: Sampling, params: dict[str, Any], room: int
    ) -> AsyncGenerator[Output, None]:
        """Outputs of one request. Closing the generator aborts it.

        Raises:
            InputError: vLLM cannot do this request.
            PromptTooLongError: prompt and answer do not fit the model's context.
            EngineError: vLLM's engine died.
        """
        longest = check_request(tokens, sampling, self._vllm_config.model_config.max_model_len, self.vocab_size)
        made = sampling_params(sampling, params, min(room, longest), self._defaults)
        prompt = {"prompt_token_ids": tokens}
        try:
            outputs = self._client.generate(prompt, made, request_id=f"inferscale-{uuid.uuid4().hex}")
            async with contextlib.aclosing(read_outputs(outputs)) as read:
                async for output in read:
                    yield output
        except EngineDeadError as error:
            raise EngineError("vLLM's engine died; the server's log names the cause. Start it again.") from error

    def encode(self, plan: EncodePlan) -> EncodeReport:
        """Not here: this is the loop that the engine answers on."""
        raise NotImplementedError

    async def aencode(self, plan: EncodePlan) -> EncodeReport:
        """See protocols.Engine."""
        return wire.encode_report(plan, await self.requests.order(plan.token_ids, wire.encode_params(plan)))

    def admits(self, authorization: str) -> bool:
        """Whether a request with this Authorization header may pass, as vLLM's --api-key has it."""
        keys = [key for key in (self._args.api_key or [envs.VLLM_API_KEY]) if key]
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.encode("utf-8", "replace")).digest()
        right = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
        return not keys or (scheme.lower() == "bearer" and any(right))
