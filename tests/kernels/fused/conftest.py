"""Tests of Triton's kernels: on the GPU where there is one, otherwise only where Triton interprets.

Triton decides which when it is imported; ``tests/kernels/test_fused.py`` starts these tests in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os

import torch

runs = importlib.util.find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)
collect_ignore_glob = [] if runs else ["test_*.py"]
