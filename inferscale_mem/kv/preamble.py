"""A trained preamble: keys and values that stand for the prompt's header while facts are encoded, in a file.

Prompts are served behind the real header. What the trained one changes is how much a fact takes from the facts it is
encoded behind (decision 0032). A safetensors file: ``<i>.keys``, before RoPE, and ``<i>.values``, both
[T, num_kv_heads, head_size] of layer i; its metadata name the T tokens that they stand for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inferscale_mem.errors import ConfigError
from inferscale_mem.types import Segment

if TYPE_CHECKING:  # reading what a file is about takes no torch
    import torch

FORMAT = "inferscale-mem preamble 1"


@dataclass(frozen=True)
class Preamble:
    """A file, opened.

    Attributes:
        path: of the file.
        segment: its tokens, and the id of the record that holds them: the digest of the file's content.
        tokenizer: digest of the tokenizer and chat template that it was trained with.
        layers: of the model that it was trained for.
    """

    path: str
    segment: Segment
    tokenizer: str
    layers: int

    @classmethod
    def open(cls, path: str) -> Preamble:
        """Read what it is about.

        Raises:
            ConfigError: it cannot be read, or is something else.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path).expanduser()
        try:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            with safe_open(file, framework="np") as opened:
                said, layers = opened.metadata() or {}, len(opened.keys()) // 2
            if said.get("format") != FORMAT:
                raise ValueError(f"it is no {FORMAT!r}")
            tokens, tokenizer = tuple(int(token) for token in json.loads(said["token_ids"])), said["tokenizer"]
            if not tokens:
                raise ValueError("it stands for no tokens")
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"engine.preamble={path!r} cannot be used: {error}. `inferscale-mem train` makes such files."
            ) from error
        return cls(str(file.absolute()), Segment("header", tokens, f"preamble.{digest[:32]}"), tokenizer, layers)

    def check(self, tokenizer: str) -> None:
        """Whether it was trained with this tokenizer and chat template, by their digest.

        Raises:
            ConfigError: with another.
        """
        if tokenizer != self.tokenizer:
            raise ConfigError(
                f"engine.preamble={self.path!r} was trained with another tokenizer or chat template than the model's; "
                "train one for it with `inferscale-mem train`."
            )

    def other_model(self) -> ConfigError:
        """What to raise where the model is not the one that it was trained for."""
        return ConfigError(
            f"engine.preamble={self.path!r} was trained for a model of other layers or heads than this one has on "
            "each GPU; train one for it with `inferscale-mem train`, and serve it from one GPU."
        )

    def load(self, shapes: Sequence[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys before RoPE and values of each layer, [T, num_kv_heads, head_size] as they were saved.

        Args:
            shapes: (num_kv_heads, head_size) of each of the model's layers.

        Raises:
            ConfigError: it was trained for another model, or the model is spread over several GPUs.
        """
        from safetensors.torch import load_file

        found = load_file(self.path)
        length = len(self.segment.token_ids)
        wanted = {f"{i}.{part}": (length, *shape) for i, shape in enumerate(shapes) for part in ("keys", "values")}
        if {name: tuple(tensor.shape) for name, tensor in found.items()} != wanted:
            raise self.other_model()
        return [(found[f"{i}.keys"], found[f"{i}.values"]) for i in range(len(shapes))]


def save(
    path: Path, token_ids: Sequence[int], tokenizer: str, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Write a file; see the top of this one.

    Args:
        path: of the file.
        token_ids: that it stands for.
        tokenizer: digest of the model's tokenizer and chat template.
        layers: keys before RoPE, and values, of each layer.
    """
    from safetensors.torch import save_file

    named = {
        f"{i}.{name}": tensor.detach().cpu().contiguous()
        for i, layer in enumerate(layers)
        for name, tensor in zip(("keys", "values"), layer, strict=True)
    }
    save_file(named, path, {"format": FORMAT, "token_ids": json.dumps(list(token_ids)), "tokenizer": tokenizer})
