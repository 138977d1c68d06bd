"""A ChatTokenizer over bytes, and chat templates written in the manner of several model families."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferscale_mem.errors import ChatTemplateError
from inferscale_mem.types import Messages

SPECIALS = ("<bos>", "<eos>", "<|start|>", "<|end|>", "[SYS]", "[INST]", "[/INST]", "<turn>", "</turn>")

# Any role anywhere, content as it is.
QWEN = """\
{%- if messages[0].role != 'system' %}<|start|>system\nYou are a model.<|end|>\n{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"""

# Any role anywhere, content trimmed, and a line of its own in the first system message.
LLAMA = """\
<bos>
{%- set ns = namespace(rest=messages, system='') %}
{%- if messages[0].role == 'system' %}
{%- set ns.system = messages[0].content | trim %}{% set ns.rest = messages[1:] %}{% endif -%}
<|start|>system\n\nCutting knowledge date: May 2000\n\n{{ ns.system }}<|end|>
{%- for m in ns.rest %}<|start|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>{% endfor %}<|start|>assistant\n\n"""

# Roles must alternate; the system message goes into the last user message.
MISTRAL = """\
<bos>
{%- set ns = namespace(rest=messages, system='') %}
{%- if messages[0].role == 'system' %}
{%- set ns.system = messages[0].content %}{% set ns.rest = messages[1:] %}{% endif %}
{%- for m in ns.rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {% if loop.last and ns.system %}{{ ns.system }}\n\n{% endif %}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}<eos>
{%- else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"""

# No system role, roles must alternate, content trimmed.
GEMMA = """\
<bos>
{%- if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}<turn>model\n"""

# One system message in front; further ones are dropped without a word.
FORGETFUL = """\
{%- if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}\n{% endif %}
{%- for m in messages %}{% if m.role in ('user', 'assistant') %}<|start|>{{ m.role }}:{{ m.content }}<|end|>
{%- endif %}{% endfor %}<|start|>assistant:"""

# Content as lists of blocks only.
BLOCKS = """\
{%- for m in messages %}<|start|>{{ m.role }}\n{% for b in m.content %}{{ b.text }}{% endfor %}<|end|>\n{% endfor -%}
<|start|>assistant\n"""

TEMPLATES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "forgetful": FORGETFUL,
    "blocks": BLOCKS,
}


class TemplateTokenizer:
    """One token per byte, and one per special token."""

    def __init__(self, template: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self._refuse
        self._template = environment.from_string(template)
        self._special = re.compile("(" + "|".join(re.escape(special) for special in SPECIALS) + ")")

    @staticmethod
    def _refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def encode(self, text: str, *, literal: bool) -> list[int]:
        if literal:
            return list(text.encode())
        pieces = self._special.split(text)
        ids = ([256 + SPECIALS.index(p)] if p in SPECIALS else list(p.encode()) for p in pieces)
        return list(itertools.chain.from_iterable(ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < 256).decode()

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        pieces = (bytes([t]) if t < 256 else SPECIALS[t - 256].encode() for t in token_ids)
        return b"".join(pieces).decode()

    def render(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        try:
            return self._template.render(messages=messages, tools=tools)
        except (TemplateError, TypeError) as error:
            raise ChatTemplateError(f"refused: {error}") from error
