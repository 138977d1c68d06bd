"""A terminal chat with memory across runs: what you tell it is kept as KV state, and injected when it answers.

    python examples/chatbot.py                      # talk to it; /help lists its commands
    printf 'I live in Oslo.\nWhere do I live?\n' | python examples/chatbot.py
    python examples/chatbot.py </dev/null           # plays a short scripted conversation and checks it

The conversation itself is in ``inferscale_mem/cli/chat/session.py``: recall with ``memory.search``, answer with
``ChatInferScale``, remember with ``memory.add``.
"""

from __future__ import annotations

import argparse

from inferscale_mem.cli import chat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chat.add_arguments(parser)
    return chat.run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
