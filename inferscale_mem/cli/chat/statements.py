"""Which of a user's own words are worth keeping as facts, without asking a model.

A sentence is kept, as it was said, if it is a statement about the speaker: it is no question (no question mark, no
question word in front), and "I", "we", "my" or "our" stands in it. Small models extract facts poorly; this rule is
plain, and what it kept is shown each time. It reads English only; ``/remember`` keeps anything.
"""

from __future__ import annotations

import re

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"[^\W\d_]+")
_SPEAKER = frozenset({"i", "im", "we", "my", "mine", "our", "ours"})
_QUESTION = frozenset(
    {
        *("what", "where", "when", "who", "whom", "whose", "which", "why", "how"),
        *("do", "does", "did", "is", "are", "am", "was", "were", "have", "has", "had"),
        *("can", "could", "will", "would", "should", "shall", "may", "might", "tell", "remind"),
    }
)
_MINIMUM_WORDS = 3


def statements(line: str) -> list[str]:
    """The sentences of a line that are statements about the speaker, in order."""
    return [sentence for part in _SENTENCE_END.split(line) if _is_statement(sentence := part.strip())]


def _is_statement(sentence: str) -> bool:
    words = [word.lower() for word in _WORD.findall(sentence)]
    return (
        len(words) >= _MINIMUM_WORDS
        and not sentence.endswith("?")
        and words[0] not in _QUESTION
        and not _SPEAKER.isdisjoint(words)
    )
