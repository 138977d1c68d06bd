"""The Triton kernels, next to a copy of as many bytes on the same GPU. Nothing is in its second-level cache beforehand.

Where Triton only interprets, they can be checked but not timed. Needs torch and Triton, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from inferscale_mem.cli.bench.kernel_problem import Case, Problem, ulps
from inferscale_mem.kernels.extract.fused import Extractor
from inferscale_mem.kernels.extract.reference import extract
from inferscale_mem.kernels.inject.fused import Injector
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.paged import PagedCaches, Step
from inferscale_mem.kernels.quantise import Stored, dequantise, quantise
from inferscale_mem.kernels.rope.reference import inverse
from inferscale_mem.kernels.topk import fused as fused_topk
from inferscale_mem.kernels.topk import reference as reference_topk

BLOCK_SIZE = 16
"""vLLM's on GPUs."""
_SWEEP = 256 << 20
"""Bytes that are written between two measurements: more than any second-level cache holds."""


def cases(layers: int, heads: int, head_size: int, tokens: int, embeddings: int, device: torch.device) -> list[Case]:
    """All kernels, checked against their references.

    Args:
        layers, heads, head_size: of a model; ``heads`` are KV heads.
        tokens: to move.
        embeddings: to search, of 384 elements.
        device: a GPU, or the CPU where Triton interprets.
    """
    problem = Problem(layers, heads, head_size, tokens, BLOCK_SIZE, device)
    floats = {kind: (problem.random(kind), problem.random(kind)) for kind in (torch.bfloat16, torch.float16)}
    keys, values = floats[torch.bfloat16]
    int4 = quantise(keys, 4, rows=8, channels=1), quantise(values, 4, channels=head_size // 4)
    return [
        injected(problem, "bf16, NHD", keys, values, "NHD", True),
        injected(problem, "bf16, HND", keys, values, "HND", True),
        injected(problem, "bf16, interleaved", keys, values, "NHD", False),
        injected(problem, "fp16, NHD", *floats[torch.float16], "NHD", True),
        injected(problem, "int8 -> bf16", quantise(keys, 8), quantise(values, 8), "NHD", True),
        injected(problem, "int4 -> bf16", *int4, "NHD", True),
        extracted(problem, "bf16", 16),
        extracted(problem, "bf16 -> int8", 8),
        extracted(problem, "bf16 -> int4", 4),
        found(embeddings, device),
    ]


def injected(problem: Problem, name: str, keys: Stored, values: Stored, order: str, neox: bool) -> Case:
    """Rows of a slab into caches whose blocks are [tokens, heads] (NHD) or [heads, tokens] (HND)."""
    dtype = keys.dtype if isinstance(keys, torch.Tensor) else torch.bfloat16
    memory, caches, places = _caches(problem, order, dtype)
    wanted = memory.clone()
    kernel = Injector(keys, values, range(problem.layers), caches)
    call = partial(kernel, _step(problem), problem.table, neox)
    call()
    cos, sin = problem.at.chunk(2, dim=1)
    for layer in range(problem.layers):
        inject(keys[layer], values[layer], *problem.places, cos, sin, neox, wanted[layer], *places)
    moved = problem.moved(dtype, keys, values)
    return Case(f"inject {name}", None, problem.count, ulps(memory, wanted), moved, call)


def extracted(problem: Problem, name: str, bits: int) -> Case:
    """Tokens of a paged cache into rows, of 16, 8 or 4 bits."""
    memory, caches, places = _caches(problem, "NHD", torch.bfloat16)
    memory.normal_()
    empty = problem.random(torch.bfloat16)
    got: list[Stored] = [empty.clone() if bits == 16 else quantise(empty, bits) for _ in range(2)]
    wanted: list[Stored] = [empty.clone() if bits == 16 else quantise(empty, bits) for _ in range(2)]
    undo = torch.cat(inverse(*problem.at.chunk(2, dim=1)), dim=1)
    call = partial(Extractor(got[0], got[1], range(problem.layers), caches), _step(problem), undo, True)
    call()
    cos, sin = problem.at.chunk(2, dim=1)
    for layer in range(problem.layers):
        extract(wanted[0][layer], wanted[1][layer], *problem.places, cos, sin, True, memory[layer], *places)
    error = max(ulps(dequantise(mine), dequantise(right)) for mine, right in zip(got, wanted, strict=True))
    return Case(f"extract {name}", None, problem.count, error, problem.moved(torch.bfloat16, *got), call)


def found(rows: int, device: torch.device) -> Case:
    """Whole numbers, so that the order of summing does not matter."""
    embeddings = torch.randint(-3, 4, (rows, 384), device=device).float()
    scopes = torch.randint(0, 2, (rows,), device=device, dtype=torch.int32)
    query, wanted = embeddings[:1].contiguous(), scopes[:1].contiguous()
    call = partial(fused_topk.topk, embeddings, scopes, query, wanted, 10)
    right = reference_topk.topk(embeddings, scopes, query, wanted, 10)
    error = 0.0 if all(torch.equal(*pair) for pair in zip(call(), right, strict=True)) else float("inf")
    moved = int((scopes == wanted).sum()) * 384 * 4
    return Case(f"topk of {rows}, half in scope", None, rows, error, moved, call)


def timed(measured: Sequence[Case], repeat: int) -> list[tuple[list[float], list[float]]]:
    """Milliseconds of each case, and of a copy of its bytes; after one uncounted round. The GPU's own clock counts."""
    sweep = torch.empty(_SWEEP, dtype=torch.uint8, device="cuda")
    copies = {moved: _copy(moved // 2) for moved in {case.moved for case in measured}}
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in measured]
    for turn in range(repeat + 1):
        # Waited for once a round: while the GPU is busy with what comes before, nobody sees how long a launch takes.
        events = [[_events(call, sweep) for call in (case.call, copies[case.moved])] for case in measured]
        torch.cuda.synchronize()
        for pairs, spent in zip(events, times, strict=True):
            for (began, ended), into in zip(pairs, spent, strict=True):
                into += [float(began.elapsed_time(ended))] * bool(turn)
    return times


def _events(call: Callable[[], object], sweep: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Around a call, before which the second-level cache is emptied."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    sweep.zero_()
    began.record()
    call()
    ended.record()
    return began, ended


def _copy(size: int) -> Callable[[], object]:
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def host_waits(problem: Problem) -> bool:
    """Whether handing a step to inject waits for the GPU to finish what it is doing."""
    keys, values = problem.random(torch.bfloat16), problem.random(torch.bfloat16)
    _, caches, _ = _caches(problem, "NHD", torch.bfloat16)
    kernel = Injector(keys, values, range(problem.layers), caches)
    for busy in (False, True):  # the first time, it is tuned
        if busy:
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # about a second
        kernel(_step(problem), problem.table, True)
    waited = torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    return bool(waited)


def _step(problem: Problem) -> Step:
    rows = problem.rows
    return Step(rows, problem.positions, np.zeros_like(rows), problem.block_table, problem.device)


def _caches(problem: Problem, order: str, dtype: torch.dtype) -> tuple[torch.Tensor, PagedCaches, list[torch.Tensor]]:
    """Memory [layers, blocks, elements], its caches, and the places of keys and of values in a block."""
    n, h, d = problem.block_size, problem.heads, problem.size
    memory = problem.memory(dtype)

    def views(part: torch.Tensor) -> list[torch.Tensor]:
        if order == "NHD":
            return [*part.view(*part.shape[:-1], n, h, 2, d).unbind(-2)]
        return [view.transpose(-3, -2) for view in part.view(*part.shape[:-1], h, n, 2, d).unbind(-2)]

    keys, values = views(memory)
    numbers = torch.arange(memory.shape[2], device=problem.device)
    return memory, PagedCaches([*keys], [*values]), views(numbers)
