"""The CPU kernel that injects, next to a copy of as many bytes. Nothing is in the processor's caches beforehand."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from inferscale_mem.cli.bench.kernel_problem import Case, Problem, ulps
from inferscale_mem.cli.bench.measuring import in_turns
from inferscale_mem.cli.bench.prompts import FACT_TOKENS
from inferscale_mem.cli.bench.report import progress
from inferscale_mem.kernels.inject.cpu import FORMS_OF, Injector
from inferscale_mem.kernels.inject.layout import Form, example, find_layout
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.quantise import Stored, parts, quantise
from inferscale_mem.kv.host_memory import use_huge_pages

BLOCK_SIZE = 128
"""vLLM's on CPUs."""
PACKINGS: dict[str, tuple[Form, Form]] = {"amx": ("column pairs", "token pairs"), "vec": ("columns", "rows")}
"""How vLLM 0.32 packs keys and values of a block on processors with AMX, and on others."""
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

_LARGEST_CACHE = 64 << 20
"""Bytes that the last-level cache is taken to have where the system does not say."""


def cases(args: argparse.Namespace) -> list[Case]:
    """Injecting records of every form into caches of every packing, on one thread and on all; checked."""
    every = torch.get_num_threads()
    found = []
    for facts in args.facts:
        count = facts * FACT_TOKENS
        problem = Problem(args.layers, args.heads, args.head_size, count, BLOCK_SIZE, torch.device("cpu"))
        for dtype in FORMS_OF:
            floats = problem.random(dtype), problem.random(dtype)
            forms = {NAMES[dtype]: floats, f"int8 to {NAMES[dtype]}": (_in_8_bits(floats[0]), _in_8_bits(floats[1]))}
            for packing in (name for name, made_of in PACKINGS.items() if not set(made_of) - set(FORMS_OF[dtype])):
                memory = problem.memory(dtype)
                for form, stored in forms.items():
                    name = f"{form}, {packing}"
                    for threads in dict.fromkeys((1, every)):
                        progress(f"checking inject, {name}, {facts} facts, threads: {threads}")
                        found.append(injected(problem, name, *stored, PACKINGS[packing], memory, threads))
    return found


def injected(
    problem: Problem,
    name: str,
    keys: Stored,
    values: Stored,
    packing: tuple[Form, Form],
    memory: torch.Tensor,
    threads: int,
) -> Case:
    """Rows of a slab into caches that are packed like this."""
    shape = (problem.block_size, problem.heads, problem.size)
    key_form, value_form = packing
    places = example(key_form, *shape)[0], example(value_form, *shape)[1]
    key_layout, value_layout = (find_layout(part) for part in places)
    assert key_layout is not None and value_layout is not None
    cos, sin = (part.contiguous() for part in problem.at.chunk(2, dim=1))
    kernel = Injector(keys, values, range(problem.layers), [*memory], key_layout, value_layout, threads)
    call = partial(kernel, *problem.places, cos, sin, True)
    memory.fill_(float("nan"))
    call()
    worst = 0.0
    for layer in range(problem.layers):
        wanted = torch.full_like(memory[layer], float("nan"))
        inject(keys[layer], values[layer], *problem.places, cos, sin, True, wanted, *places)
        worst = max(worst, ulps(memory[layer], wanted))
    return Case(f"inject {name}", threads, problem.count, worst, problem.moved(memory.dtype, keys, values), call)


def _in_8_bits(floats: torch.Tensor) -> Stored:
    made = quantise(floats, 8)
    for part in parts(made):
        use_huge_pages(part)
    return made


def timed(measured: Sequence[Case], repeat: int) -> list[tuple[list[float], list[float]]]:
    """Milliseconds of each case, and of a copy of its bytes on as many threads; after one uncounted round."""
    sweep = torch.ones(2 * _last_level_cache() // 8, dtype=torch.int64)
    every = torch.get_num_threads()
    copies = {bytes_: _copy(bytes_) for bytes_ in {case.moved // 2 for case in measured}}
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in measured]
    for turn in range(repeat + 1):
        progress(f"timing: round {turn + 1} of {repeat + 1}")
        for case, (ours, copied) in zip(measured, found, strict=True):
            for call, spent in in_turns(((case.call, ours), (copies[case.moved // 2], copied)), turn):
                sweep.sum()  # all of it, on all threads: reads everything else out of the caches
                torch.set_num_threads(case.threads or every)
                began = time.perf_counter()
                call()
                ended = time.perf_counter()
                torch.set_num_threads(every)
                spent += [1000 * (ended - began)] * bool(turn)
    return found


def _copy(size: int) -> Callable[[], object]:
    source, target = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    for tensor in (source, target):
        use_huge_pages(tensor)
        tensor.fill_(1)
    return partial(target.copy_, source)


def _last_level_cache() -> int:
    """Bytes."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=_LARGEST_CACHE)
