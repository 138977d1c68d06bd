"""Everything this package raises on purpose.

    InferScaleError
    ├── ConfigError                 a setting is wrong or two settings contradict each other
    │   ├── MissingDependencyError  an extra is not installed; names the extra
    │   └── PortInUseError          another program listens there already
    ├── ModelError                  the model cannot be found, read or converted
    │   ├── ChatTemplateError       the model has no usable chat template
    │   └── UnsupportedModelError   the model's KV state cannot be stored and moved; lists every reason
    ├── EngineError                 the engine failed to start or to answer
    │   ├── EngineClosedError       used after close()
    │   └── SelfTestError           the engine's answers with injected KV differ from its plain ones
    ├── InputError                  what the caller gave cannot be used; nothing was stored or started
    │   ├── ScopeError              no owner, a wildcard owner, or owners that do not fit together
    │   ├── FactError               an empty or over-long fact
    │   ├── HandleError             a malformed, forged, foreign or stale handle, where one is required
    │   └── PromptTooLongError      prompt and answer do not fit the model's context
    └── StoreError                  facts cannot be read or written
        ├── StoreLockedError        another process holds the embedded store
        └── BudgetError             the record budget cannot hold what was asked for

Each keeps its cause (``raise … from``) and says in its message what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class InferScaleError(Exception):
    """Root of the tree; catching it catches everything this package raises on purpose."""


class ConfigError(InferScaleError):
    """A setting is wrong, or two settings contradict each other."""


class MissingDependencyError(ConfigError):
    """A package that an extra brings is not installed.

    Args:
        package: name of the distribution or module.
        extra: the extra of this package that brings it.
        hint: further ways out, as sentences.
    """

    def __init__(self, package: str, extra: str, *, hint: str = "") -> None:
        install = f"{package!r} is not installed. Install it with: pip install 'inferscale-mem[{extra}]'"
        super().__init__(f"{install}. {hint}" if hint else install)
        self.package = package
        self.extra = extra


class PortInUseError(ConfigError):
    """Another program listens on the port already."""


class ModelError(InferScaleError):
    """The model cannot be found, read or converted."""


class ChatTemplateError(ModelError):
    """The model has no chat template, or its template refuses the messages."""


class UnsupportedModelError(ModelError):
    """The model's KV state cannot be stored before RoPE and moved.

    Args:
        model: name or path of the model.
        reasons: one sentence per obstacle, each naming what was found.
    """

    def __init__(self, model: str, reasons: Sequence[str]) -> None:
        listed = "; ".join(reasons)
        super().__init__(
            f"{model} cannot be used with injected memory: {listed}. Choose another model, or start the engine "
            "with connector=False to serve it with memories as plain text."
        )
        self.model = model
        self.reasons = tuple(reasons)


class EngineError(InferScaleError):
    """The engine failed to start or to answer."""


class EngineAwayError(EngineError):
    """No answer from the server: it is down, starts, or cannot be reached. It may be back soon."""


class EngineClosedError(EngineError):
    """The engine was closed; open a new one."""


class SelfTestError(EngineError):
    """At start, answers with injected KV differed from plain prefill by more than rounding."""


class InputError(InferScaleError, ValueError):
    """What the caller gave cannot be used; nothing was stored or started."""


class ScopeError(InputError):
    """No owner, a wildcard owner, or owners that do not fit together."""


class FactError(InputError):
    """An empty or over-long fact."""


class HandleError(InputError):
    """A malformed, forged, foreign or stale handle, where a good one is required."""


class PromptTooLongError(InputError):
    """Prompt and answer do not fit the model's context."""


class StoreError(InferScaleError):
    """Facts cannot be read or written."""


class StoreLockedError(StoreError):
    """Another process holds the embedded store."""


class BudgetError(StoreError):
    """The record budget cannot hold what was asked for."""
