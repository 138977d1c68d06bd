"""``inferscale-mem serve [MODEL] [options of vLLM's server]``: vLLM's own OpenAI-compatible server, with memory.

Without MODEL it serves the packaged small one. It listens on 127.0.0.1, port 8000, unless --host and --port say
otherwise. A folder is served under its path and its name. Every other option goes to vLLM as it is: ``vllm serve
--help`` lists them, and so does vLLM's documentation (its CPU build has no ``vllm`` command).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import socket
from collections.abc import Sequence

from inferscale_mem.cli.port_lock import held_port
from inferscale_mem.config import RECORD_DTYPES, EngineConfig, InferScaleConfig
from inferscale_mem.engines.serve_options import check_options, option
from inferscale_mem.errors import ConfigError, MissingDependencyError, PortInUseError
from inferscale_mem.models import resolve_model

HOST, PORT = "127.0.0.1", 8000
_WITH_VALUE = ("--record-bytes", "--record-dtype", "--preamble")
_ALONE = ("--no-self-test", "-h", "--help")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command; vLLM's own are not among them."""
    default = EngineConfig()
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face id or folder (default: the packaged one)"
    )
    parser.add_argument(
        "--record-bytes",
        type=int,
        default=default.record_bytes,
        help=f"budget for records, per GPU (default: {default.record_bytes})",
    )
    parser.add_argument(
        "--record-dtype",
        choices=RECORD_DTYPES,
        default=default.record_dtype,
        help=f"of records: as in the KV cache (auto), or in less room (default: {default.record_dtype})",
    )
    parser.add_argument(
        "--preamble", metavar="FILE", help="encode facts behind this one, made by `inferscale-mem train`"
    )
    parser.add_argument("--no-self-test", action="store_true", help="do not check at start that injection is exact")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those that are vLLM's."""
    count = 1 if arguments and not arguments[0].startswith("-") else 0
    own, others = list(arguments[:count]), []
    rest = iter(arguments[count:])
    for argument in rest:
        if argument in _WITH_VALUE:
            own += [argument, *([value] if (value := next(rest, None)) is not None else [])]
        elif argument in _ALONE or argument.startswith(tuple(f"{name}=" for name in _WITH_VALUE)):
            own.append(argument)
        else:
            others.append(argument)
    return own, others


def run(args: argparse.Namespace) -> int:
    """Serve until somebody stops it."""
    options: list[str] = args.passed_on
    if option(options, "--model") is not None:
        raise ConfigError("Give the model first, without --model: inferscale-mem serve MODEL …")
    EngineConfig(record_bytes=args.record_bytes)
    check_options(options)
    address = check_port(options)
    config = InferScaleConfig.from_env({"model": args.model} if args.model else {})
    with held_port(config.home, *address) if address else contextlib.nullcontext():
        return _serve(args, options, config)


def _serve(args: argparse.Namespace, options: Sequence[str], config: InferScaleConfig) -> int:
    model = resolve_model(config)
    try:
        vllm_serve = importlib.import_module("inferscale_mem.engines.vllm_serve")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingDependencyError("vllm", "vllm", hint="Without a GPU: the extra [cpu], see the README.") from error
    code: int = vllm_serve.serve(
        model,
        options,
        config,
        record_bytes=args.record_bytes,
        record_dtype=args.record_dtype,
        preamble=args.preamble,
        self_test=not args.no_self_test,
    )
    return code


def check_port(options: Sequence[str]) -> tuple[str, int] | None:
    """Whether the server can listen where it is told to, before a model is loaded for minutes.

    Returns:
        Numeric address and port (0: any); None if it listens on no port.

    Raises:
        ConfigError: the port is no number.
        PortInUseError: another program listens there.
    """
    if option(options, "--uds") is not None:
        return None
    host, port = option(options, "--host") or HOST, option(options, "--port") or str(PORT)
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--port {port}: give a number from 1 to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, int(port)))
            return str(tried.getsockname()[0]), int(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"Cannot listen on {host}, port {port}: {error}.") from error
            raise PortInUseError(
                f"Another program listens on {host}, port {port}. Stop it, or choose another port with --port."
            ) from error
