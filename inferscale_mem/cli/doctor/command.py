"""Run all checks, show each as it is done, and write them down if asked to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Iterator, Sequence

import inferscale_mem
from inferscale_mem.cli.arguments import add_json
from inferscale_mem.cli.doctor.finding import Finding
from inferscale_mem.cli.doctor.libraries import BASE, TORCH, TRANSFORMERS, VLLM, check_library, check_python
from inferscale_mem.cli.doctor.machine import check_device, check_home, check_memory, find_gpus
from inferscale_mem.cli.doctor.models import check_embedder, check_key, check_model
from inferscale_mem.config import InferScaleConfig
from inferscale_mem.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_json(parser, "write the findings to this file, too")


def run(args: argparse.Namespace) -> int:
    """Check everything; 0 unless something needed fails."""
    print("Loading each library once; that can take a minute.", file=sys.stderr, flush=True)
    findings = []
    for finding in examine():
        show(finding)
        findings.append(finding)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    print(f"Needed and not working: {', '.join(failed)}." if failed else "All that is needed is there.")
    if args.json:
        args.json.write_text(json.dumps(as_json(findings), indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    yield check_python()
    try:
        config = InferScaleConfig.from_env()
    except ConfigError as error:
        yield Finding("settings", "fail", str(error), "Correct the environment variable; the rest was not checked.")
        return
    yield Finding("settings", "ok", f"engine {config.engine.kind}, encoding {config.encoding.policy}")
    yield check_library(TORCH, needed=True)
    yield check_library(TRANSFORMERS, needed=True)
    yield check_library(VLLM, needed=config.engine.kind == "vllm")
    for library in BASE:
        yield check_library(library, needed=True)
    gpus = find_gpus()
    yield check_device(gpus)
    yield check_memory(config, gpu=bool(gpus.found))
    yield check_home(config)
    yield check_key(config)
    yield check_model(config)
    yield check_embedder(config)


def show(finding: Finding) -> None:
    """One finding for a person, at once: the next one may take a while."""
    print(f"{finding.status:<5} {finding.name:<15} {finding.detail}", flush=True)
    if finding.advice:
        print(f"{'':<21} -> {finding.advice}", flush=True)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings and what they were made on, as plain JSON types."""
    return {
        "ok": all(finding.status != "fail" for finding in findings),
        "checks": [dataclasses.asdict(finding) for finding in findings],
        "meta": {
            "inferscale_mem": inferscale_mem.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "executable": sys.executable,
        },
    }
