"""Top-k calibration of the hinges on three classes: does the least conditional risk rank the k likeliest classes first?

With class probabilities eta, the conditional risk of scores s is sum_y eta_y L(s, y). A loss is top-k calibrated when
scores whose top k are not the k likeliest classes cannot reach the infimum of that risk (Yang and Koyejo 2020). All
losses here are piecewise linear with integer slopes and kinks at integers, and do not change when a constant is added
to the scores, so that a grid over two scores, the third being 0, holds a minimiser.
"""

import pytest
import torch

from topk_registry import create_loss

STEP = 1 / 8
GRID = torch.cartesian_prod(*[torch.arange(-3, 3 + STEP, STEP, dtype=torch.float64)] * 2)
SCORES = torch.cat([GRID, torch.zeros(len(GRID), 1, dtype=torch.float64)], 1)  # [points, 3]

# no class has a majority, so one-class hinges prefer to tell nothing apart; the first has one, so that two-class hinges
# gain nothing from telling the second class from the third
AMBIGUOUS, DOMINATED = ((0.42, 0.32, 0.26), 1), ((0.6, 0.25, 0.15), 2)


def conditional_risk(name: str, eta: tuple[float, ...], **options: float) -> torch.Tensor:
    loss = create_loss(name, reduction="none", **options)
    labels = (torch.full((len(SCORES),), y) for y in range(3))
    return sum(p * loss(SCORES, label) for p, label in zip(eta, labels, strict=True))


def excess_of_wrong_rankings(name: str, eta: tuple[float, ...], k: int, **options: float) -> float:
    """The least risk among scores by which some top-k set misses one of the k likeliest classes, above the least."""
    risk = conditional_risk(name, eta, k=k, **options)
    wrong = SCORES[:, k:].amax(1) >= SCORES[:, :k].amin(1)  # eta falls, so the likeliest come first; ties may go wrong
    return (risk[wrong].min() - risk.min()).item()


@pytest.mark.parametrize(("eta", "k"), [AMBIGUOUS, DOMINATED])
def test_calibrated_hinge_ranks_the_likeliest_first(eta, k):
    # its least risk is the least top-k error, and exchanging the k-th likeliest for the next costs what they differ by
    assert conditional_risk("topk_hinge_calibrated", eta, k=k).min().item() == pytest.approx(sum(eta[k:]))
    assert excess_of_wrong_rankings("topk_hinge_calibrated", eta, k) == pytest.approx(eta[k - 1] - eta[k])


@pytest.mark.parametrize(
    ("name", "eta", "k"),
    [("topk_hinge", *AMBIGUOUS), ("topk_hinge_convex", *AMBIGUOUS), ("topk_hinge_convex", *DOMINATED)],
)
def test_earlier_hinges_do_not(name, eta, k):
    assert excess_of_wrong_rankings(name, eta, k) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("eta", "k"), [AMBIGUOUS, DOMINATED])
def test_noised_loss_keeps_the_ranking_at_small_noise(eta, k):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        excess = excess_of_wrong_rankings("noised_topk", eta, k, epsilon=0.005)
    # no draw is beyond 6, so that every risk is within 6 epsilon of the calibrated hinge's
    assert excess == pytest.approx(eta[k - 1] - eta[k], abs=2 * 6 * 0.005)
    assert excess > 0
