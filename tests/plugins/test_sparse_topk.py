"""Sparse top-k: its loss against a search over masks, limits, options."""

import pytest
import torch
from torch.nn import functional as F

from topk_plugins.sparse_topk import SparseTopK
from topk_registry import create_loss, use_backend

N = 9
LABELS = torch.arange(6)


def scores(rows: int = 6, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_is_zero_where_the_label_is_in_the_mask_entirely():
    s = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = SparseTopK(2)(s, torch.tensor([1]))
    loss.backward()
    assert loss == 0
    assert not s.grad.any()


def test_a_small_tau_is_the_hard_hinge_without_a_gap():
    s = scores()
    hinge = create_loss("topk_svm", k=3, alpha=0.0)(s, LABELS) * 3
    torch.testing.assert_close(SparseTopK(3, tau=1e-9)(s, LABELS), hinge, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "narrow", "wide", "outlier", "ruled out"])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 4), (9, 2), (40, 39), (40, 20), (120, 5), (120, 118)])
def test_the_table_of_all_classes_is_that_of_two_masks_a_class(kind, n, k):
    """Each class by itself, in value and gradient, where masks hold many classes and across gaps wider than tau."""
    s = torch.randn(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n + k))
    s = {"ties": s.round(), "flat": 0 * s, "narrow": 0.05 * s, "wide": 30 * s}.get(kind, s)
    if kind == "outlier":
        s[:, 0], s[2, 1] = 1e4, -1e30
    if kind == "ruled out" and k + 1 < n:
        s[:, 3] = -torch.inf
    q = torch.rand(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * s.isfinite()
    table, alone = s.clone().requires_grad_(), s.clone().requires_grad_()
    found = SparseTopK(k, reduction="none")(table, q)
    label = torch.arange(n).repeat(4)
    each = SparseTopK(k, reduction="none")(alone.repeat_interleave(n, 0), label).view(4, n)
    wanted = torch.where(q > 0, q * each, 0.0).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11 * n)
    (of_table,), (of_each,) = torch.autograd.grad(found.sum(), table), torch.autograd.grad(wanted.sum(), alone)
    torch.testing.assert_close(of_table, of_each, rtol=0, atol=1e-11 * n)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_score_far_above_all_others_is_in_every_mask(backend):
    """The rest of the row is that of k - 1 among the others, to the digit."""
    s, q = scores(), torch.softmax(scores().flip(0), -1)
    for target in (torch.full((6,), 4), q):
        loss = SparseTopK(2, reduction="none")
        with use_backend(backend):
            for far in (1e4, 1e12, 1e30):
                both = torch.cat((torch.full((6, 1), far).double(), s), 1)
                found = loss(both, target + 1 if target.ndim == 1 else F.pad(target, (1, 0)))
                torch.testing.assert_close(found, SparseTopK(1, reduction="none")(s, target), rtol=1e-11, atol=1e-11)


def test_soft_targets_take_memory_for_a_few_tables():
    """At flat scores, as before training, every class is in every mask."""
    s, q = torch.zeros(8, 4000, requires_grad=True), torch.full((8, 4000), 1 / 4000)
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        SparseTopK(5, reduction="none")(s, q).sum().backward()
    assert max(saved) <= 2 * s.numel()
    assert sum(saved) <= 60 * s.numel()
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_second_derivatives_for_a_distribution_are_those_of_its_label(k):
    n = 9
    loss = create_loss("sparse_topk", k=k, tau=1.0)
    generator = torch.Generator().manual_seed(0)
    for trial in range(40):
        logits = (0.3, 1.0, 3.0, 6.0)[trial % 4] * torch.randn(1, n, generator=generator, dtype=torch.float64)
        label = torch.tensor([trial % n])
        one_hot = torch.nn.functional.one_hot(label, n).double()
        hessians = [
            torch.autograd.functional.hessian(lambda s, target=target: loss(s, target), logits)
            for target in (label, one_hot)
        ]
        torch.testing.assert_close(hessians[1], hessians[0], rtol=1e-9, atol=1e-9)
