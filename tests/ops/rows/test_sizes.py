"""Set sizes and counts of row losses: those that no row can have are refused before a kernel counts by them."""

import inspect

import pytest
import torch

from topk_registry import rows
from topk_registry.rows import Curve, row_losses

N = 6

# each row loss that counts classes, by its count; the greatest that rows of N scores may have
COUNTED = {
    "topk_hinge_rows": (lambda k: rows.topk_hinge_rows(k), N - 1),
    "topk_hinge_rows rank": (lambda k: rows.topk_hinge_rows(k, against="rank"), N - 1),
    "topk_hinge_rows mean": (lambda k: rows.topk_hinge_rows(k, against="mean"), N - 1),
    "sparse_topk_rows": (lambda k: rows.sparse_topk_rows(k), N - 1),
    "soft_topk_rows": (lambda k: rows.soft_topk_rows(k), N - 1),
    "lapsum_rows": (lambda k: rows.lapsum_rows(k), N - 1),
    "smooth_topk_rows": (lambda k: rows.smooth_topk_rows(k), N - 1),
    "perturbed_hinge_rows": (lambda k: rows.perturbed_hinge_rows(k), N),
    "ranking_rows": (lambda k: rows.ranking_rows((k,), (1.0,), candidates=2**31 - 1), N - 1),
    "ranking_rows all": (lambda k: rows.ranking_rows((k,), (1.0,), candidates=None), N - 1),
}
NOT_COUNTED = {"aldr_rows", "ldr_rows", "quadratic_bound_rows", "sigmoid_rows", "softmax_rows", "squares_rows"}


def test_every_row_loss_is_here():
    made = {name for name in rows.__all__ if name.endswith("_rows") and inspect.isfunction(getattr(rows, name))}
    assert made == {name.split()[0] for name in COUNTED} | NOT_COUNTED


@pytest.mark.parametrize("name", COUNTED)
def test_the_greatest_size_and_the_next(name):
    make, greatest = COUNTED[name]
    scores, label = torch.randn(3, N, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    assert row_losses(make(greatest), scores, label).isfinite().all()
    with pytest.raises(ValueError, match=r"rows must have more than 6 scores, got \[3, 6\]"):
        row_losses(make(greatest + 1), scores, label)


@pytest.mark.parametrize("wrong", [0, -1, True, "5", None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", COUNTED)
def test_a_wrong_size_is_refused(name, wrong):
    with pytest.raises(ValueError, match=r"must be (an integer of at least 1|a finite number above 0), got"):
        COUNTED[name][0](wrong)


@pytest.mark.parametrize("name", [name for name in COUNTED if name.split()[0] not in ("soft_topk_rows", "lapsum_rows")])
@pytest.mark.parametrize("beyond", [2**31, 2**63 - 1, 2**63, 2**70])
def test_a_size_that_kernels_cannot_hold_is_refused(name, beyond):
    with pytest.raises(ValueError, match=rf"must be an integer from 1 to 2147483647, got {beyond}"):
        COUNTED[name][0](beyond)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rows.topk_hinge_rows(2, against="best"), "against must be one of 'rival', 'rank', 'mean', got 'best'"),
        (lambda: rows.topk_hinge_rows(2, alpha="1"), "alpha must be a finite number, got '1'"),
        (lambda: rows.sparse_topk_rows(2, tau=0), "tau must be a finite number above 0, got 0"),
        (lambda: rows.ranking_rows((2, 5), (0.5, 0.5), candidates=5), "candidates must be an integer of at least 6"),
        (lambda: rows.ranking_rows((2,), (1.0,), tau=-1.0), "tau must be a finite number above 0, got -1.0"),
        (lambda: rows.perturbed_hinge_rows(2, num_samples=2**31), "num_samples must be an integer from 1 to"),
        (lambda: rows.softmax_rows(best=-1), "best must be an integer of at least 0, got -1"),
        (lambda: rows.aldr_rows(alpha=1.0), "alpha must be a finite number above 1, got 1.0"),
        (lambda: rows.ldr_rows(4, gap=-1), "gap must be a finite number of at least 0, got -1"),
        (lambda: rows.squares_rows(epsilon=0), "epsilon must be a finite number above 0, got 0"),
    ],
)
def test_a_wrong_option_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_curve_is_still_free_to_choose():
    loss = rows.softmax_rows(Curve(lambda log_p, log_not_p, own: -own * log_p), best=N)
    scores = torch.zeros(1, N)
    torch.testing.assert_close(row_losses(loss, scores, torch.tensor([0])), torch.tensor([N]).log())
