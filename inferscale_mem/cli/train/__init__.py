"""``inferscale-mem train``: a preamble for this model, behind which facts are encoded nearer to plain text.

The model stays as it is. What is optimised is one file: the keys and values that stand in for the prompt's header while
a fact is encoded, so that answers from records come near to those of plain prefill, over the facts and questions of a
file of LoCoMo's form. Serve with it by ``engine.preamble``.
"""

from inferscale_mem.cli.train.command import add_arguments as add_arguments
from inferscale_mem.cli.train.command import run as run
