"""Torch operations: batches of flat rows, of rows with small top groups, and of others."""

import pytest
import torch

from tests.ops.ksubset.scores import nearly_flat, scores
from tests.oracles import spot_log_odds
from topk_registry.ops.ksubset import topk_label_margins, topk_log_odds
from topk_registry.ops.ksubset.torch import all_classes, flat, labels, rows

EPS = torch.finfo(torch.float32).eps
N = 200


def flat_row(k: int) -> torch.Tensor:
    return nearly_flat("gaussian", N, k, 0.4)


LARGE = {
    "normal": lambda x, k: x,
    "far apart": lambda x, k: 300 * x,
    "ties": lambda x, k: x.round(),
    "outliers": lambda x, k: x.index_fill(1, torch.tensor([5, 7]), 1e4),
    "k above all others": lambda x, k: torch.where(torch.arange(x.shape[1]) < k, 50.0, 0.0).double()[None],
    "two left": lambda x, k: torch.where(torch.arange(x.shape[1]) < k + 2, x, -torch.inf),
}


BATCHES = {
    "most are flat": lambda k: [flat_row(k), scores("outlier", N, 1), flat_row(k), nearly_flat("gaussian", N, k, 1.5)],
    "few are flat": lambda k: [flat_row(k), scores("outlier", N, 1), scores("wide", N, 1), scores("block", N, 1)],
    "more leaders than k": lambda k: [torch.randn(2, N).index_fill(1, torch.arange(2 * k), 8.0), scores("wide", N, 1)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("k", [2, labels.SMALL, 50])
def test_every_row_is_right_whatever_the_others_are(k, batch, monkeypatch):
    s = torch.cat(BATCHES[batch](k))
    s = torch.cat((s, s[:1]))
    s[-1, 7] = torch.nan
    label, g = torch.arange(len(s)) * 20, torch.randn(len(s), N)
    margin, gradient = labels.label_margins(s, label, k, 1.0)
    of_all, product = all_classes.margins(s, k, 1.0), all_classes.margins_backward(g, s, k, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(flat, "odds", lambda *args: None)
        exact, exact_gradient = labels._with_group(s.double(), label, k, 1.0, small=False)
        exact_all = all_classes.margins(s.double(), k, 1.0)
        exact_product = all_classes.margins_backward(g.double(), s.double(), k, 1.0)
    for x in (margin, gradient, of_all, product):
        assert x[-1].isnan().any()  # the label's own entry is 1 whatever the scores are
        assert x[:-1].isfinite().all()
    good = slice(-1)
    # what the logarithms, and sums of chances of up to one, lose by rounding
    torch.testing.assert_close(margin[good], exact[good], rtol=0, atol=40 * EPS * float(exact[good].abs().max() + 1))
    assert ((gradient - exact_gradient)[good].abs() <= 20 * EPS).all()
    assert ((of_all - exact_all)[good].abs() <= 40 * EPS * exact_all[good].abs().clamp(min=1.0)).all()
    assert ((product - exact_product)[good].abs() <= 40 * EPS * (g.abs().amax() + exact_product[good].abs())).all()


def test_flat_rows_are_not_sorted(monkeypatch):
    s, label, k = torch.cat([flat_row(5)] * 3), torch.tensor([0, 20, 199]), 5
    s[1, 20] = 50.0  # a label that leads leaves a flat row

    def fail(*args):
        raise AssertionError("sorted")

    monkeypatch.setattr(rows, "largest", fail)
    monkeypatch.setattr(torch.Tensor, "topk", fail)
    margin, _ = labels.label_margins(s, label, k, 1.0)
    assert margin[1] > 40
    assert all_classes.margins(s[::2], k, 1.0).isfinite().all()


@pytest.mark.slow
def test_rows_are_not_looked_at_elsewhere_than_on_the_cpu():
    s = torch.empty(2, 9, device="meta")
    assert flat.odds(s, 2, 1.0, 0.5) is None
    assert labels.label_margins(s, torch.zeros(2, dtype=torch.long, device="meta"), 2, 1.0)[1].shape == (2, 9)


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        *((2300, 1150, kind) for kind in LARGE),
        (2200, 1001, "k above all others"),
        pytest.param(10000, 5000, "normal", marks=pytest.mark.slow),
    ],
)
def test_large_k_against_extended_precision(n, k, kind):
    """Half of k drawn on average would leave exactly k a chance of down to 2^-k, which is 0 in double precision."""
    x = torch.randn(1, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = LARGE[kind](x, k)
    classes = [0, 5, k + 1, int(x.argmax()), int(x[0, :k].argmin())]
    expected = torch.tensor(spot_log_odds(x[x > -torch.inf].tolist(), k, classes), dtype=torch.float64)
    found = topk_log_odds(x, k, impl="torch")
    torch.testing.assert_close(found[0, classes], expected, rtol=1e-12, atol=1e-12)
    assert abs(found.sigmoid().sum() - k) < 1e-9 * k
    for label in (0, k + 1):
        s = x.clone().requires_grad_()
        margin = topk_label_margins(s, torch.tensor([label]), k, impl="torch")
        torch.testing.assert_close(margin, found[:, label], rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(margin, s)
        assert gradient.isfinite().all()
        assert gradient[0, label] == 1
        assert abs(gradient.sum()) < 1e-9  # one class less is drawn of the others where the label is


def test_gradients_of_large_k_are_the_covariance():
    n, k = 2300, 1160  # by differences of marginals, which are exact to the last digits
    x = torch.randn(1, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v = torch.randn(1, n, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    s, step = x.clone().requires_grad_(), 1e-4
    (product,) = torch.autograd.grad(topk_log_odds(s, k, impl="torch").sigmoid(), s, v)
    ahead, behind = (topk_log_odds(x + h * v, k, impl="torch").sigmoid() for h in (step, -step))
    torch.testing.assert_close(product, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)
