"""Top-k classification over relaxed rankings: the relaxations' formulas, limits, candidates."""

import math

import pytest
import torch
from torch.nn import functional as F

from topk_plugins.differentiable_topk import rank_logits
from topk_registry import create_loss

N = 8
RELAXATIONS = ("neuralsort", "softsort")


def scores(rows: int = 5, n: int = N, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


LABELS = torch.tensor([0, 3, 7, 2, 5])


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("n", [2, 3, 8, 11])
def test_a_cold_ranking_is_the_ranking(relaxation, n):
    x = scores(n=n)
    wanted = F.one_hot(x.argsort(-1, descending=True), n).double()
    found = rank_logits(x / 1e-3, n, relaxation).softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


def test_one_k_by_softmax_is_cross_entropy():
    """Of all classes, however many there are, unless candidates are asked for."""
    for n in (N, 40):
        s = 2 * torch.randn(len(LABELS), n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for options in ({}, {"candidates": None}):
            found = create_loss("differentiable_topk", k=1, **options)(s, LABELS)
            torch.testing.assert_close(found, F.cross_entropy(s, LABELS))
    rivals = s.scatter(1, LABELS[:, None], -torch.inf).topk(15).values
    highest = torch.cat((s.gather(1, LABELS[:, None]), rivals), 1)
    found = create_loss("differentiable_topk", k=1, candidates=16)(s, LABELS)
    torch.testing.assert_close(found, F.cross_entropy(highest, torch.zeros_like(LABELS)))


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("candidates", [None, 5])
def test_soft_targets_are_expectations(relaxation, candidates):
    s, q = scores(), torch.softmax(scores().flip(0), -1)
    loss = create_loss("differentiable_topk", k=[1, 3], relaxation=relaxation, candidates=candidates, reduction="none")
    table = torch.stack([loss(s, torch.full((5,), c)) for c in range(N)], 1)
    torch.testing.assert_close(loss(s, q), (q * table).sum(-1))


@pytest.mark.parametrize("relaxation", RELAXATIONS)
@pytest.mark.parametrize("candidates", [None, 5])
def test_gradients(relaxation, candidates):
    s = scores().requires_grad_()
    loss = create_loss("differentiable_topk", k=[1, 3], relaxation=relaxation, candidates=candidates, tau=0.5)
    assert torch.autograd.gradcheck(lambda s: loss(s, LABELS), s)


def test_candidates_grow_with_k():
    assert [create_loss("differentiable_topk", k=k).ranking().candidates for k in (1, 7, 20, [1, 50])] == [
        None,
        16,
        42,
        102,
    ]
    assert create_loss("differentiable_topk", k=1, top1="sort").ranking().candidates == 16
    s = scores(n=120).requires_grad_()
    for relaxation in RELAXATIONS:
        create_loss("differentiable_topk", k=20, relaxation=relaxation)(s, LABELS).backward()
    assert s.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": math.inf}, r"whole number above k = 5 and .*, or None for all classes, got inf"),
        ({"k": [1, 20], "candidates": 16}, r"a whole number above k = 20 and .*, or None for all classes, got 16"),
        ({"candidates": 9.5}, r"a whole number above k = 5 and .*, or None for all classes, got 9.5"),
        ({"candidates": "all"}, r"a whole number above k = 5 and .*, or None for all classes, got 'all'"),
        ({"k": [1, 1]}, "k must be an integer or a list of different integers, got \\[1, 1\\]"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        create_loss("differentiable_topk", **options)


def test_more_candidates_than_any_number_of_classes_are_all_of_them():
    s, label = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    found, wanted = (create_loss("differentiable_topk", candidates=m)(s, label) for m in (2**31 - 1, 20))
    assert found == wanted
