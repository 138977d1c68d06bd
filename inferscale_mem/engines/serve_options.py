"""What the options of vLLM's server say, read before vLLM is loaded: that takes long, and its model longer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from inferscale_mem.errors import ConfigError

CONNECTOR = "InferScaleConnector"
ONE_PROCESS = (
    "Memory lives in one engine and one API server process: leave out --api-server-count and --data-parallel-size, and "
    "start several servers behind a router that keeps each user on one of them."
)
NO_CONNECTOR = (
    "The memory middleware needs the memory connector: start with `inferscale-mem serve` without --kv-transfer-config, "
    "or give it as docs/server.md has it."
)

_KEPT = ("auto", "bfloat16", "float16", "float32")
_SHORT = {
    "--api-server-count": "-asc",
    "--data-parallel-size": "-dp",
    "--decode-context-parallel-size": "-dcp",
    "--speculative-config": "-sc",
}
_COUNTS = {
    "--api-server-count": ONE_PROCESS,
    "--data-parallel-size": ONE_PROCESS,
    "--decode-context-parallel-size": "Records cannot be cut over decode context parallel ranks; leave it out.",
}


def check_options(options: Sequence[str]) -> None:
    """Refuse what the server would refuse once its model is loaded.

    What is not written on the command line (a --config file, what the model's own files say) is checked then.

    Raises:
        ConfigError: one of the options does not go with memory.
    """
    for name, why in _COUNTS.items():
        given = option(options, name)
        if given is not None and given.isdigit() and int(given) > 1:
            raise ConfigError(f"{name} {given}: {why}")
    dtype = option(options, "--kv-cache-dtype")
    if dtype is not None and dtype not in _KEPT:
        raise ConfigError(
            f"--kv-cache-dtype {dtype}: records cannot be made of a quantised KV cache; leave it out. (--record-dtype "
            "int8 keeps the records themselves in about half the room.)"
        )
    for name in ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"):
        if any(_name(given) == name or _name(given).startswith(f"{name}.") for given in options):
            raise ConfigError(f"{name}: memory does not work with speculative decoding; leave it out.")
    transfer = option(options, "--kv-transfer-config")
    if transfer is not None and _connector(transfer) != CONNECTOR:
        raise ConfigError(NO_CONNECTOR)


def option(options: Sequence[str], name: str) -> str | None:
    """The value of an option, the last one if it is given twice; None if it is not given."""
    found = None
    for i, given in enumerate(options):
        if _name(given) != name:
            continue
        if "=" in given:
            found = given.partition("=")[2]
        elif i + 1 < len(options):
            found = options[i + 1]
    return found


def _name(given: str) -> str:
    """An option as it is spelt in vLLM's help: with dashes, and long."""
    name = given.partition("=")[0]
    for long, short in _SHORT.items():
        if name == short:
            return long
    return name.replace("_", "-") if name.startswith("--") else ""


def _connector(transfer: str) -> object:
    """The connector that --kv-transfer-config names; vLLM explains what is no JSON."""
    try:
        told = json.loads(transfer)
    except ValueError:
        return CONNECTOR
    return told.get("kv_connector") if isinstance(told, Mapping) else CONNECTOR
