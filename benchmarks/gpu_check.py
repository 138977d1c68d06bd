"""Triton's kernels on a GPU: do they agree with their references, and how near is each to a plain copy of its bytes?

Started by gpu_check.sh. Where Triton only interprets (TRITON_INTERPRET=1), it checks a tiny problem and times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton

from inferscale_mem.kernels.extract.fused import Extractor
from inferscale_mem.kernels.extract.reference import extract
from inferscale_mem.kernels.inject.fused import Injector
from inferscale_mem.kernels.inject.reference import inject
from inferscale_mem.kernels.paged import PagedCaches, Step
from inferscale_mem.kernels.quantise import Quantised, Stored, dequantise, quantise
from inferscale_mem.kernels.rope.reference import inverse
from inferscale_mem.kernels.topk import fused as fused_topk
from inferscale_mem.kernels.topk import reference as reference_topk

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    """One line of the table: largest error in units of the last place, bytes read and written, and what was run."""

    name: str
    ulps: float
    moved: int
    call: Callable[[], object]


class Problem:
    """Facts of 22 tokens, scattered over a slab, to be written to positions of one request."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.layers, self.heads, self.size, self.count = args.layers, args.heads, args.head_size, args.tokens
        self.device, self.generator = device, np.random.default_rng(0)
        facts = -(-self.count // 22)
        self.num_rows = 24 * 4 * facts
        firsts = self.generator.permutation(4 * facts)[:facts] * 24
        rows = (firsts[:, None] + np.arange(22)).reshape(-1)[: self.count]
        positions = np.arange(self.count) + 30
        num_blocks = 1 + -(-(self.count + 30) // BLOCK_SIZE)
        blocks = self.generator.permutation(num_blocks)
        self.num_blocks = num_blocks
        self.step = Step(rows, positions, np.zeros_like(rows), blocks, device)
        self.numbers = rows, positions, blocks
        places = rows, blocks[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        self.places = [torch.from_numpy(part).to(device) for part in places]
        angles = torch.rand(self.count + 30, self.size // 2, device=device) * 6.28
        self.table = torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16()
        self.at = self.table[torch.from_numpy(positions).to(device)].float()

    def random(self, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.layers, self.num_rows, self.heads, self.size)
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def caches(self, order: str, dtype: torch.dtype) -> tuple[torch.Tensor, PagedCaches, list[torch.Tensor]]:
        """Memory [layers, blocks, elements], its caches, and the places of keys and of values in a block."""
        n, h, d = BLOCK_SIZE, self.heads, self.size
        memory = torch.full(
            (self.layers, self.num_blocks, 2 * n * h * d), float("nan"), dtype=dtype, device=self.device
        )

        def views(part: torch.Tensor) -> list[torch.Tensor]:
            if order == "NHD":
                return [*part.unflatten(-1, (n, h, 2, d)).unbind(-2)]
            return [view.transpose(-3, -2) for view in part.unflatten(-1, (h, n, 2, d)).unbind(-2)]

        keys, values = views(memory)
        numbers = torch.arange(memory.shape[2], device=self.device)
        return memory, PagedCaches([*keys], [*values]), views(numbers)


def ulps(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest distance, in units of the last place; infinite where only one is a number."""
    if not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    least = torch.iinfo(bits).min
    steps = [x.nan_to_num(0.0).view(bits).long() for x in (got, wanted)]
    first, second = (torch.where(x < 0, least - x, x) for x in steps)
    return float((first - second).abs().max())


def size_of(stored: Stored, tokens: int) -> int:
    """Bytes that so many rows of all layers take."""
    parts = [stored] if isinstance(stored, torch.Tensor) else [stored.codes, stored.scale]
    if isinstance(stored, Quantised) and stored.zero is not None:
        parts.append(stored.zero)
    rows = stored.shape[1]
    return sum(part.numel() * part.element_size() for part in parts) * tokens // rows


def injected(problem: Problem, name: str, keys: Stored, values: Stored, order: str, neox: bool) -> Row:
    dtype = keys.dtype if isinstance(keys, torch.Tensor) else torch.bfloat16
    memory, caches, places = problem.caches(order, dtype)
    wanted = memory.clone()
    kernel = Injector(keys, values, range(problem.layers), caches)
    kernel(problem.step, problem.table, neox)
    cos, sin = problem.at.chunk(2, dim=1)
    for layer in range(problem.layers):
        inject(keys[layer], values[layer], *problem.places, cos, sin, neox, wanted[layer], *places)
    written = 2 * problem.layers * problem.count * problem.heads * problem.size * memory.element_size()
    moved = written + size_of(keys, problem.count) + size_of(values, problem.count)
    return Row(f"inject {name}", ulps(memory, wanted), moved, lambda: kernel(problem.step, problem.table, neox))


def extracted(problem: Problem, name: str, bits: int) -> Row:
    memory, caches, places = problem.caches("NHD", torch.bfloat16)
    memory.normal_()
    empty = problem.random(torch.bfloat16)
    got: list[Stored] = [empty.clone() if bits == 16 else quantise(empty, bits) for _ in range(2)]
    wanted: list[Stored] = [empty.clone() if bits == 16 else quantise(empty, bits) for _ in range(2)]
    undo = torch.cat(inverse(*problem.at.chunk(2, dim=1)), dim=1)
    kernel = Extractor(got[0], got[1], range(problem.layers), caches)
    kernel(problem.step, undo, True)
    cos, sin = problem.at.chunk(2, dim=1)
    for layer in range(problem.layers):
        extract(wanted[0][layer], wanted[1][layer], *problem.places, cos, sin, True, memory[layer], *places)
    error = max(ulps(dequantise(mine), dequantise(right)) for mine, right in zip(got, wanted, strict=True))
    read = 2 * problem.layers * problem.count * problem.heads * problem.size * memory.element_size()
    moved = read + sum(size_of(stored, problem.count) for stored in got)
    return Row(f"extract {name}", error, moved, lambda: kernel(problem.step, undo, True))


def found(rows: int, device: torch.device) -> Row:
    """Whole numbers, so that the order of summing does not matter."""
    embeddings = torch.randint(-3, 4, (rows, 384), device=device).float()
    scopes = torch.randint(0, 2, (rows,), device=device, dtype=torch.int32)
    query, wanted = embeddings[:1].contiguous(), scopes[:1].contiguous()
    got = fused_topk.topk(embeddings, scopes, query, wanted, 10)
    right = reference_topk.topk(embeddings, scopes, query, wanted, 10)
    error = 0.0 if all(torch.equal(*pair) for pair in zip(got, right, strict=True)) else float("inf")
    moved = int((scopes == wanted).sum()) * 384 * 4
    return Row(
        f"topk of {rows}, half in scope", error, moved, lambda: fused_topk.topk(embeddings, scopes, query, wanted, 10)
    )


def rows_of(args: argparse.Namespace, device: torch.device) -> list[Row]:
    problem = Problem(args, device)
    floats = {kind: (problem.random(kind), problem.random(kind)) for kind in (torch.bfloat16, torch.float16)}
    keys, values = floats[torch.bfloat16]
    int4 = quantise(keys, 4, rows=8, channels=1), quantise(values, 4, channels=args.head_size // 4)
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
        found(args.embeddings, device),
    ]


def host_waits(problem: Problem) -> bool:
    """Whether handing a step to inject waits for the GPU to finish what it is doing."""
    keys, values = problem.random(torch.bfloat16), problem.random(torch.bfloat16)
    _, caches, _ = problem.caches("NHD", torch.bfloat16)
    kernel = Injector(keys, values, range(problem.layers), caches)
    rows, positions, blocks = problem.numbers
    for busy in (False, True):  # the first time, it is tuned
        if busy:
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # about a second
        kernel(Step(rows, positions, np.zeros_like(rows), blocks, problem.device), problem.table, True)
    waited = torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    return bool(waited)


def copy_rate(moved: int) -> float:
    """Bytes per second, read and written, of a device-to-device copy of as many bytes."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return moved / triton.testing.do_bench(lambda: target.copy_(source), return_mode="median") * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1100, help="injected at once: 50 facts of 22")
    parser.add_argument("--embeddings", type=int, default=100_000)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not triton.knobs.runtime.interpret:
        print("No GPU that torch can use. To check the kernels without one, set TRITON_INTERPRET=1.", file=sys.stderr)
        return 2
    if not on_gpu:
        args.layers, args.heads, args.head_size, args.tokens, args.embeddings = 2, 2, 16, 30, 200
    torch.manual_seed(0)
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "Triton's interpreter: no times"
    print(f"{name}; torch {torch.__version__}, Triton {triton.__version__}")
    print(f"{args.layers} layers, {args.heads} heads of {args.head_size}, {args.tokens} tokens\n")
    print(f"{'kernel':<30} {'ulp':>5} {'MB':>8} {'GB/s':>8} {'of a copy':>10}")
    wrong = 0
    for row in rows_of(args, device):
        wrong += row.ulps > 1
        line = f"{row.name:<30} {row.ulps:>5g} {row.moved / 1e6:>8.1f}"
        if on_gpu:
            rate = row.moved / triton.testing.do_bench(row.call, return_mode="median") * 1e3
            line += f" {rate / 1e9:>8.0f} {rate / copy_rate(row.moved):>10.0%}"
        print(line, flush=True)
    if on_gpu:
        waits = host_waits(Problem(args, device))
        wrong += waits
        print(f"\nThe host waits for the GPU when it injects: {'YES' if waits else 'no'}")
    print(f"\n{wrong} wrong" if wrong else "\nAll agree with their references to 1 ulp.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
