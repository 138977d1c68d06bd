"""``inferscale-mem chat``: a terminal chat with memory across runs."""

from inferscale_mem.cli.chat.command import add_arguments, run

__all__ = ["add_arguments", "run"]
