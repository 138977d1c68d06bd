"""From tokens to text as they come: never half a character, never part of a stop string."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.types import Sampling

REPLACEMENT = "\ufffd"
"""What decoders put where bytes do not make a character (yet)."""


class Detokenizer:
    """Text of a growing list of tokens.

    Args:
        decode: text of tokens, special ones left out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown_from = 0  # tokens that are decoded again, so that what a token means beside its neighbour is right
        self._shown_to = 0

    def add(self, token: int) -> str:
        """The text this token completes; "" in the middle of a character."""
        self._tokens.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What is left when no more tokens come: at most a broken character."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._tokens[self._shown_from : self._shown_to])
        after = self._decode(self._tokens[self._shown_from :])
        if not final and (len(after) <= len(before) or after.endswith(REPLACEMENT)):
            return ""
        self._shown_from, self._shown_to = self._shown_to, len(self._tokens)
        return after[len(before) :]


class StopFilter:
    """Holds text back while it may be the start of a stop string.

    Args:
        stops: end the text where one of them begins; none of them is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string has come."""
        self._held += text
        found = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class AnswerText:
    """Text of one answer as its tokens come, and where it ends.

    Args:
        tokenizer: of the model.
        sampling: ``max_tokens`` is set.
        end_tokens: any of them ends the answer, unless ``ignore_eos``.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling, end_tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._sampling = sampling
        self._end_tokens = frozenset(end_tokens)
        skip = sampling.skip_special_tokens
        self._detokenizer = Detokenizer(functools.partial(tokenizer.decode, skip_special_tokens=skip))
        self._stop = StopFilter(sampling.stop)

    def add(self, token: int, complete: bool = False) -> tuple[str, str | None]:
        """New text, and why the answer ends here if it does: "stop" or "length".

        Args:
            complete: nothing can follow this token.
        """
        self.tokens.append(token)
        ends = token in self._end_tokens and not self._sampling.ignore_eos
        text, stopped = "" if ends else self._detokenizer.add(token), False
        if len(self.tokens) > self._sampling.min_tokens:
            text, stopped = self._stop.add(text)
        if stopped:
            return text, "stop"
        ended = complete or ends
        if not ended and len(self.tokens) != self._sampling.max_tokens:
            return text, None
        last, stopped = self._stop.add(self._detokenizer.finish())
        rest = "" if stopped else self._stop.finish()
        return text + last + rest, "stop" if ended or stopped else "length"
