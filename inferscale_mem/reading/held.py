"""Holding text back while it may be the beginning of a mark."""

from __future__ import annotations


def starts(mark: str, text: str) -> bool:
    """Whether ``text`` may grow into something that starts with ``mark``."""
    return len(text) < len(mark) and mark.startswith(text)


def split_at(text: str, mark: str) -> tuple[str, str, bool]:
    """The text before the mark, without line breaks at its end; what is behind the mark; and whether it is there.

    If it is not, the second part is the end of the text that may still become line breaks and the mark.
    """
    before, found, behind = text.partition(mark)
    if found:
        return before.rstrip("\n"), behind, True
    keep = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    shown = text[: len(text) - keep].rstrip("\n")
    return shown, text[len(shown) :], False
