"""What is measured, as functions of numbers and texts; no model here.

Differences are taken question by question against plain prefill of the same facts in the same order. Questions of one
conversation share facts and speakers, so they are not independent: standard errors take a conversation as one cluster.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
"""Log-probs [answer tokens, vocabulary]."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]|_")


@dataclass(frozen=True)
class Comparison:
    """One answer's log-probs next to those of plain prefill.

    Attributes:
        ll: log-likelihood of the answer, nats a token.
        dll: the same less that of plain prefill.
        kl_mean: KL(plain prefill || this) in nats, mean over the answer's tokens.
        kl_first: at the first token.
        top1: share of the answer's tokens at which both find the same token most likely.
    """

    ll: float
    dll: float
    kl_mean: float
    kl_first: float
    top1: float


def compare(text: Scores, other: Scores, answer: Sequence[int]) -> Comparison:
    """``other`` next to ``text``, over the tokens of a given answer."""
    kl, ll = divergence(text, other), log_likelihood(other, answer)
    return Comparison(
        ll=ll,
        dll=ll - log_likelihood(text, answer),
        kl_mean=float(kl.mean()),
        kl_first=float(kl[0]),
        top1=float((text.argmax(-1) == other.argmax(-1)).mean()),
    )


def log_likelihood(scores: Scores, answer: Sequence[int]) -> float:
    """Of an answer, nats a token."""
    return float(scores[np.arange(len(answer)), list(answer)].mean(dtype=np.float64))


def divergence(text: Scores, other: Scores) -> NDArray[np.float64]:
    """KL(text || other) in nats, at each token."""
    p, q = text.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q))
    kl: NDArray[np.float64] = np.maximum(terms.sum(-1), 0.0)  # rounding may leave it just below
    return kl


def words(text: str) -> list[str]:
    """An answer's words: lower case, without punctuation, symbols and articles, of any language."""
    return _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", unicodedata.normalize("NFC", text).lower())).split()


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the answer's words."""
    mine, theirs = words(answer), words(gold)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs)) if common else float(answer.strip().lower() == gold.strip().lower())


def bleu1(answer: str, gold: str) -> float:
    """Precision of the answer's words, each counted as often as the right answer has it, with the brevity penalty."""
    mine, theirs = words(answer), words(gold)
    common = sum((Counter(mine) & Counter(theirs)).values())
    if not common:
        return float(answer.strip().lower() == gold.strip().lower())
    return common / len(mine) * math.exp(min(0.0, 1 - len(theirs) / len(mine)))


def recall(evidence: Sequence[str], served: Sequence[Sequence[str]]) -> float | None:
    """Share of the turns that hold the answer from which a served fact was taken; None if no turns are named."""
    found = {turn for turns in served for turn in turns}
    return sum(turn in found for turn in evidence) / len(evidence) if evidence else None


def mean_and_error(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float | None]:
    """Mean over questions, and its standard error with conversations as clusters.

    Of a single conversation it is the error over its questions; None for a single question.
    """
    mean = float(np.mean(values))
    if len(set(clusters)) == 1:
        clusters = [str(number) for number in range(len(values))]
    sums: dict[str, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean
    count = len(sums)
    if count < 2:
        return mean, None
    return mean, math.sqrt(count / (count - 1) * sum(total**2 for total in sums.values())) / len(values)


def jackknife_error(statistic: Callable[[frozenset[str]], float | None], clusters: Sequence[str]) -> float | None:
    """Standard error of a statistic that is no mean, from leaving out one conversation after the other.

    Args:
        statistic: takes the conversations that are left out; None where it has no value, and then there is no error.
        clusters: each question's conversation.
    """
    names = sorted(set(clusters))
    if len(names) < 2:
        return None
    values = [value for name in names if (value := statistic(frozenset([name]))) is not None]
    if len(values) < len(names):
        return None
    middle = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((value - middle) ** 2 for value in values))


def closed(value: float, alone: float) -> float | None:
    """Share of the way from ``alone`` to plain prefill (0) that ``value`` has gone; None if there is none to go."""
    return 1 - value / alone if alone else None
