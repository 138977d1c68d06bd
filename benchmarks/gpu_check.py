"""Triton's kernels on a GPU: do they agree with their references, and how near is each to a plain copy of its bytes?

Started by gpu_check.sh. Where Triton only interprets (TRITON_INTERPRET=1), it checks a tiny problem and times nothing.
``inferscale-mem bench kernels`` measures the same, where all of this package is installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
import triton

from inferscale_mem.cli.bench.gpu_kernels import BLOCK_SIZE, cases, host_waits, timed
from inferscale_mem.cli.bench.kernel_problem import WORST_ULPS, Problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1100, help="injected at once: 50 facts of 22")
    parser.add_argument("--embeddings", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=100, help="measurements of each")
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
    found = cases(args.layers, args.heads, args.head_size, args.tokens, args.embeddings, device)
    times = timed(found, args.repeat) if on_gpu else [([], []) for _ in found]
    for case, (ours, copied) in zip(found, times, strict=True):
        line = f"{case.name:<30} {case.ulps:>5g} {case.moved / 1e6:>8.1f}"
        if on_gpu:
            mine, copy = statistics.median(ours), statistics.median(copied)
            line += f" {case.moved / mine / 1e6:>8.0f} {copy / mine:>10.0%}"
        print(line)
    wrong = sum(not case.ulps <= WORST_ULPS for case in found)
    if on_gpu:
        waits = host_waits(Problem(args.layers, args.heads, args.head_size, args.tokens, BLOCK_SIZE, device))
        wrong += waits
        print(f"\nThe host waits for the GPU when it injects: {'YES' if waits else 'no'}")
    print(f"\n{wrong} wrong" if wrong else "\nAll agree with their references to 1 ulp.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
