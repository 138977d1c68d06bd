"""What the engine checks about itself at start, after the rope probe: injected answers must equal plain ones."""

from __future__ import annotations

import itertools

import torch

from inferscale_mem.config import AUTO
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.engines.hf.records import RecordBytes, pages_for
from inferscale_mem.errors import SelfTestError

MAX_KL = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Nats. Rounding gives some 1e-7 in float32 and 0.002 in bfloat16; a wrong layout gives several, rows that are off by
one may give less than 0.05."""
MAX_KL_IN_8_BITS = 0.05
TOKENS = 40
SPLIT = (13, 31)
"""Two records, neither a whole number of pages, and the rest."""


def run_self_test(model: HFModel, record_dtype: str) -> None:
    """Encode a prefix as two records, inject them, and compare the next token's log-probs with plain prefill.

    Args:
        model: that is loaded.
        record_dtype: in which records are stored.

    Raises:
        SelfTestError: they differ by more than rounding.
    """
    count = min(TOKENS, model.max_model_len)
    edges = [0, *(min(edge, count - 1) for edge in SPLIT)]
    spans = [(start, end) for start, end in itertools.pairwise(edges) if start < end]
    if not spans:
        return
    tokens = torch.randint(model.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    records = RecordBytes(model.layers, pages_for(TOKENS) + len(spans), model.dtype, model.device, record_dtype)
    recorded, injected = model.new_cache(record=True), model.new_cache()
    plain = model.forward([tokens], recorded)
    pages: list[list[int]] = []
    for start, end in spans:
        used = sum(map(len, pages))
        pages.append(list(range(used, used + pages_for(end - start))))
        records.store(pages[-1], start, end, recorded)
    records.inject(pages, [end - start for start, end in spans], injected)
    other = model.forward([tokens[spans[-1][1] :]], injected)
    expected = plain.log_softmax(-1)
    kl = float((expected.exp() * (expected - other.log_softmax(-1))).sum())
    if not kl <= (MAX_KL[model.dtype] if record_dtype == AUTO else MAX_KL_IN_8_BITS):
        raise SelfTestError(
            f"With injected KV, {model.path} answers differently than with plain prefill (KL {kl:.3g} nats). Please "
            "report the model; engine.connector=False serves it without memory."
        )
