"""In which data type a CPU computes best."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


def cpu_dtype(asked: str) -> str:
    """The data type to load a model in that runs on this machine's CPU.

    With AVX2 and no AVX512 there is nothing to multiply 16-bit numbers with, so each is widened first: a prefill of
    1,300 tokens takes 20 s in bfloat16 there and 4.2 in float32 (SmolLM2-135M, vLLM 0.32, 2 cores).

    Args:
        asked: engine.dtype.

    Returns:
        "float32" where "auto" would be slow, else what was asked for.
    """
    if asked != "auto" or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return asked
    logger.info("float32: this processor (AVX2) is slow in 16 bits. engine.dtype='bfloat16' takes half the memory")
    return "float32"
