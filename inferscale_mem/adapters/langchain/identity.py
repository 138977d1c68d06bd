"""What ChatInferScale is to others: to LangChain's cache and traces, written down, and in tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from langchain_core.language_models.base import LangSmithParams
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented

from inferscale_mem.adapters.langchain.answers import PROVIDER
from inferscale_mem.adapters.langchain.fields import ChatFields, shown_name
from inferscale_mem.adapters.langchain.options import PLACING_FIELDS, SAMPLING_FIELDS, read_scope
from inferscale_mem.config import InferScaleConfig


class ChatIdentity(ChatFields):
    """How it is known."""

    @property
    def model_name(self) -> str:
        """The engine's model: its Hugging Face id, or the name of its folder."""
        return shown_name(self._service.engine.info.model)

    @property
    def _llm_type(self) -> str:
        return "inferscale"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All of this model that an answer depends on: LangChain's cache keys on it, and on the call's keywords.

        The model's own options are nested, since keywords of the same names would take their places even where a call
        leaves them to the model.
        """
        scope = read_scope(self._defaults)
        return {
            **self._answering,
            "defaults": {
                "scope": scope.key if scope else None,
                **{name: getattr(self, name) for name in (*SAMPLING_FIELDS, *PLACING_FIELDS)},
            },
        }

    @property
    def _answering(self) -> dict[str, Any]:
        """What answers: an engine and a store of facts, or settings, so that no engine is started to say it."""
        if self._settings is not None:
            settings = json.dumps(dataclasses.asdict(self._settings), default=str, sort_keys=True)
            return {"model_name": self.model, "settings": hashlib.sha256(settings.encode()).hexdigest()}
        service = self._service
        return {
            "model_name": self.model_name,
            "engine": service.engine.info.fingerprint,
            "store": service.signer.store,
            "encoding": dataclasses.asdict(service.config),
        }

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return str([sorted(self._identifying_params.items()), stop, sorted(kwargs.items())])

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self._stops, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    # Written down. LangChain's ``load`` takes classes from outside its own packages only by name:
    # load(text, allowed_objects=[ChatInferScale], valid_namespaces=["inferscale_mem"]).

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Models made from settings are written down; one around a live object says that it cannot be (``to_json``)."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where the class is found again."""
        return ["inferscale_mem", "adapters", "langchain"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """What is written down as a name only."""
        return {"api_key": "INFERSCALE_API_KEY"}

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """As LangChain writes objects down; a model around a live object says that it cannot be."""
        if self._settings is None or isinstance(self.config, InferScaleConfig):
            return self.to_json_not_implemented()
        fields = type(self).model_fields
        told = {name: getattr(self, name) for name in sorted(self.model_fields_set) if not fields[name].exclude}
        if "config" in told:
            told["config"] = _without_keys(told["config"])
        secrets = {
            name: {"lc": 1, "type": "secret", "id": [variable]}
            for name, variable in self.lc_secrets.items()
            if told.get(name) is not None
        }
        return {"lc": 1, "type": "constructor", "id": self.lc_id(), "kwargs": {**told, **secrets}}


def _without_keys(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Settings without what must not be written down; whoever reads them has it in the environment."""
    if config is None:
        return None
    told = {name: value for name, value in config.items() if name != "handle_key"}
    if isinstance(told.get("engine"), Mapping):
        told["engine"] = {name: value for name, value in told["engine"].items() if name != "api_key"}
    return told
