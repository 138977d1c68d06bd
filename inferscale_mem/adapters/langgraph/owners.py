"""Whose items are in a namespace: no two namespaces have one owner, unless one is a part of the other."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from inferscale_mem.adapters.langgraph.items import Namespace
from inferscale_mem.errors import ConfigError, InputError
from inferscale_mem.types import OWNER_FIELDS, Scope

_PLACES = {f"{{{name}}}": name for name in OWNER_FIELDS}


class Owners:
    """Namespaces as scopes.

    Args:
        pattern: what namespaces begin with, with "{user_id}", "{agent_id}" and "{run_id}" where owners stand; None:
            each namespace is an owner of its own.

    Raises:
        ConfigError: the pattern names no owner, or one twice.
    """

    def __init__(self, pattern: Sequence[str] | None) -> None:
        self._pattern = tuple(pattern) if pattern is not None else None
        if self._pattern is None:
            return
        places = [part for part in self._pattern if part in _PLACES]
        if not places:
            raise ConfigError(f"namespace={self._pattern!r} names no owner; put '{{user_id}}' where it stands.")
        if len(set(places)) < len(places):
            raise ConfigError(f"namespace={self._pattern!r} names one owner twice; which one is it?")

    def scope(self, namespace: Namespace) -> Scope:
        """The owner of exactly this namespace.

        Raises:
            InputError: it does not look like the pattern, or a label cannot stand for an owner.
        """
        for label in namespace:
            _check_label(label)
        if self._pattern is None:
            return Scope(user_id="/".join(quote(label, safe="") for label in namespace))
        pairs = list(zip(self._pattern, namespace, strict=False))
        if len(namespace) < len(self._pattern) or any(p not in _PLACES and p != label for p, label in pairs):
            raise InputError(f"Namespace {namespace!r} does not look like {self._pattern!r}, as the store was told.")
        owners = {_PLACES[part]: label for part, label in pairs if part in _PLACES}
        for name, label in owners.items():
            if any(char.isspace() for char in label):  # a memory takes "a " for "a"
                raise InputError(f"Namespace label {label!r} is no {name}: it has spaces in it. Leave them out.")
        return Scope.of(owners)

    def scope_under(self, prefix: Namespace) -> Scope | None:
        """The one owner of all namespaces that begin like this; None if there may be several, or none."""
        if self._pattern is None or len(prefix) < len(self._pattern):
            return None
        try:
            return self.scope(prefix)
        except InputError:
            return None


def _check_label(label: object) -> None:
    if not isinstance(label, str):
        raise InputError(f"A namespace is made of text, not {type(label).__name__}.")
    try:
        label.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Namespace label {label!a} has lone surrogates; decode it as UTF-8.") from error
