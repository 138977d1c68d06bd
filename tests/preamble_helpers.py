"""Preambles that stand for a tiny model's own header, or for something else."""

from __future__ import annotations

from pathlib import Path

import torch

from inferscale_mem.cli.train.lessons import Lessons
from inferscale_mem.cli.train.training import Trainer
from inferscale_mem.config import EngineConfig
from inferscale_mem.engines.hf.model import HFModel
from inferscale_mem.kv import preamble
from inferscale_mem.prompt import PromptPlanner
from inferscale_mem.tokenizer import load_tokenizer


def save(model: str, file: Path, noise: float = 0.0) -> str:
    """What the model itself keeps of the default header, plus so much noise; returns the file."""
    tokenizer = load_tokenizer(model)
    header = PromptPlanner(tokenizer, "x").default_header().token_ids
    config = EngineConfig(kind="transformers", dtype="float32")
    trainer = Trainer(HFModel(model, config), Lessons(header, tokenizer.digest, (), {}), rate=0.1)
    torch.manual_seed(0)
    layers = [tuple(part + noise * torch.randn_like(part) for part in layer) for layer in trainer.preamble]
    preamble.save(file, header, tokenizer.digest, layers)
    return str(file)
