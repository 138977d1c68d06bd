"""The Triton form of top-k against the reference, on whole numbers: sums are exact in any order, ties are many."""

from __future__ import annotations

import pytest
import torch

from inferscale_mem.kernels.topk import fused, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(count: int, size: int, queries: int, k: int, dtype: torch.dtype = torch.float32, scopes: int = 3) -> None:
    generator = torch.Generator().manual_seed(count)
    embeddings = torch.randint(-3, 4, (count, size), generator=generator).to(dtype).to(DEVICE)
    asked = torch.randint(-3, 4, (queries, size), generator=generator).to(dtype).to(DEVICE)
    owners = torch.randint(-1, scopes, (count,), generator=generator, dtype=torch.int32).to(DEVICE)
    wanted = torch.randint(-1, scopes + 1, (queries,), generator=generator, dtype=torch.int32).to(DEVICE)
    poisoned = embeddings.clone()
    poisoned[owners == reference.ANY] = float("nan")  # what was removed is not looked at
    scores, rows = fused.topk(poisoned, owners, asked, wanted, k)
    right_scores, right_rows = reference.topk(embeddings, owners, asked, wanted, k)
    assert torch.equal(rows, right_rows)
    assert torch.equal(scores, right_scores)


@pytest.mark.parametrize(
    "count, size, queries, k",
    [(1, 1, 1, 1), (7, 5, 3, 10), (128, 64, 2, 1), (129, 65, 2, 3), (400, 20, 2, 7), (0, 4, 2, 3), (5, 4, 0, 2)],
)
def test_odd_shapes(count: int, size: int, queries: int, k: int) -> None:
    compare(count, size, queries, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_embeddings(dtype: torch.dtype) -> None:
    compare(150, 24, 1, 5, dtype)


def test_more_than_a_block_keeps_and_more_rounds_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_BLOCK", 16)
    monkeypatch.setattr(fused, "_ROUND", 64)
    compare(200, 3, 2, 20, scopes=1)


def test_signs_of_zero_tie_and_negative_scores_sort() -> None:
    embeddings = torch.tensor([[-0.0], [0.0], [-2.0], [1.0], [-1.0]], device=DEVICE)
    owners, wanted = torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    scores, rows = fused.topk(embeddings, owners, torch.ones(1, 1, device=DEVICE), wanted, 5)
    assert rows.tolist() == [[3, 0, 1, 4, 2]]
    assert scores.tolist() == [[1, 0, 0, -1, -2]]


def test_another_scope_is_never_found() -> None:
    embeddings = torch.ones(40, 8, device=DEVICE)
    owners = torch.arange(40, dtype=torch.int32, device=DEVICE) % 2
    wanted = torch.tensor([1, 7], dtype=torch.int32, device=DEVICE)
    scores, rows = fused.topk(embeddings, owners, torch.ones(2, 8, device=DEVICE), wanted, 25)
    assert rows[0].tolist() == [*range(1, 40, 2), *[-1] * 5]
    assert rows[1].tolist() == [-1] * 25 and scores[1].isneginf().all()


@pytest.mark.parametrize("k", [0, fused.MOST + 1])
def test_a_bad_k_is_refused(k: int) -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="k must be"):
        fused.topk(one, one[0].int(), one, one[0].int(), k)
