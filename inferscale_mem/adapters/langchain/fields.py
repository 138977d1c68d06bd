"""The fields of ChatInferScale, and what stands behind them: checked settings, and the service that answers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from langchain_core.language_models import BaseChatModel, ModelProfile
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from inferscale_mem.adapters.langchain.options import (
    PLACING_FIELDS,
    SAMPLING_FIELDS,
    own_names,
    read_sampling,
    read_scope,
)
from inferscale_mem.adapters.langchain.source import WAYS, Holder, check_source, hold, read_settings, service_of
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.prompt import Position
from inferscale_mem.service import MemoryService
from inferscale_mem.types import OWNER_FIELDS, Scope


class ChatFields(BaseChatModel):
    """Fields, and the service behind them."""

    memory: Any = Field(default=None, exclude=True, repr=False)
    """An InferScaleMemory or AsyncInferScaleMemory; its engine and facts are used."""
    service: Any = Field(default=None, exclude=True, repr=False)
    """A MemoryService."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An Engine."""

    model: str | None = None
    """Hugging Face id or folder of the model to open, or its name on the server; None takes the environment's, else the
    packaged one."""
    base_url: str | None = None
    """Of a server that runs ``inferscale-mem serve``."""
    api_key: SecretStr | None = None
    """For the server."""
    timeout: float | None = None
    """Seconds until a request to the server is given up."""
    max_retries: int | None = None
    """How often a request that the server did not take is sent again."""
    config: Mapping[str, Any] | InferScaleConfig | None = Field(default=None, repr=False)
    """Further settings of the engine to open, as InferScaleConfig has them."""

    max_tokens: int | None = None
    """Most tokens of an answer. This and others may have the names of other providers, here and in calls: see
    ``OTHER_NAMES``."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    """Stop strings; those of a call replace them."""
    n: int = 1
    """Answers a request; more than one cannot be streamed."""
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool | int | None = None
    """True, or how many a token, for ``response_metadata["logprobs"]``."""
    top_logprobs: int | None = None
    scope: Mapping[str, str] | Scope | None = None
    """Whose facts may be shown; None takes it from the handles."""
    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None
    memory_position: Position = "system"
    """Where memories stand: in the system message, or ("latest") right before the latest human message, so that a long
    conversation is not computed again when they change."""
    human_handles: bool = False
    """Handles in human messages ask for memories, too; needs a scope, since anybody may write them."""
    streaming: bool = False

    _settings: InferScaleConfig | None = PrivateAttr(default=None)
    _held: Holder | None = PrivateAttr(default=None)

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _name_as_here(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        try:
            named = own_names(values)
        except InputError as error:
            raise ConfigError(str(error)) from error
        if unknown := sorted(str(name) for name in named if name not in cls.model_fields):
            known = sorted(set(cls.model_fields) - set(BaseChatModel.model_fields))
            near = difflib.get_close_matches(unknown[0], known, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{unknown[0]!r} is no option of {cls.__name__}; {meant}Known are: {', '.join(known)}.")
        return named

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._settings = read_settings(
            self.config,
            alone=not self.model_fields_set & set(WAYS),
            model=self.model,
            base_url=self.base_url,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            timeout=self.timeout,
            retries=self.max_retries,
        )
        check_source(self.memory, self.service, self.engine, self._settings)
        self._show_server()
        try:
            read_sampling(self._defaults)
            read_scope(self._defaults)
        except InputError as error:
            raise ConfigError(str(error)) from error
        return self

    def _show_server(self) -> None:
        """The server that the environment or ``config`` names, where others look for it; not as if it were given."""
        engine = self._settings.engine if self._settings else None
        if engine is None or engine.base_url is None:
            return
        found = {"base_url": engine.base_url, "api_key": SecretStr(engine.api_key) if engine.api_key else None}
        for name, value in found.items():
            if getattr(self, name) is None and value is not None:
                object.__setattr__(self, name, value)

    def _resolve_model_profile(self) -> ModelProfile | None:
        """What the engine can do; None as long as it would have to be started to know."""
        if self.memory is not None:
            service = getattr(self.memory, "open_service", None)
            return None if service is None else _profile(service)
        return None if self.engine is None and self.service is None else _profile(self._service)

    @property
    def _service(self) -> MemoryService:
        if self.memory is not None:
            service = self.memory.service
        elif self.service is not None:
            service = self.service
        else:
            if self._held is None:
                self._held = hold(self.engine, self._settings)
            service = service_of(self._held)
        assert isinstance(service, MemoryService)
        if self.profile is None:
            self.profile = _profile(service)
        return service

    @property
    def _stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ()) or None

    @property
    def _defaults(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*SAMPLING_FIELDS, *PLACING_FIELDS, "scope", *OWNER_FIELDS)}


def shown_name(model: str) -> str:
    """A model's name for people and traces: the Hugging Face id, or the folder's name, which says less of the machine
    than its path."""
    return Path(model).name if Path(model).is_absolute() else model


def _profile(service: MemoryService) -> ModelProfile:
    longest = service.engine.info.max_model_len
    return ModelProfile(
        name=shown_name(service.engine.info.model),
        open_weights=True,
        max_input_tokens=longest - 1,
        max_output_tokens=longest - 1,
        text_inputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        tool_calling=True,
        tool_choice=True,
        tool_call_streaming=True,
        # Guided decoding leaves no room for tool calls beside it, and agents that see True want both at once.
        structured_output=False,
    )
