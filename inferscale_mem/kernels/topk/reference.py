"""Top-k in plain torch: what every faster form is tested against."""

from __future__ import annotations

import torch

ANY = -1
"""As a query's scope: rows of every scope. As a row's: the row is free, and never found."""


def topk(
    embeddings: torch.Tensor, scopes: torch.Tensor, queries: torch.Tensor, wanted: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k rows of a scope whose product with a query is largest; of equal ones, the first.

    Args:
        embeddings: [N, E] float.
        scopes: [N] int32: whose each row is.
        queries: [Q, E], of the same dtype.
        wanted: [Q] int32: in whose rows each query looks.
        k: at least 1.

    Returns:
        Scores [Q, k] float32, largest first, and rows [Q, k] int64; -inf and -1 where a scope has fewer rows.
    """
    scores = queries.float() @ embeddings.float().T
    found = (scopes >= 0) & ((scopes == wanted[:, None]) | (wanted[:, None] == ANY))
    scores = torch.where(found, scores, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True)
    best, rows = order.values[:, :k], order.indices[:, :k]
    rows = torch.where(best > -torch.inf, rows, -1)
    missing = (0, k - best.shape[1])
    return torch.nn.functional.pad(best, missing, value=-torch.inf), torch.nn.functional.pad(rows, missing, value=-1)
