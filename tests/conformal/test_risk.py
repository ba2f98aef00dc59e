"""Risk control of the false negative rate: against its definition, and the promise by repetition.

All draws have fixed seeds. Each test of a hypothesis has level 0.001.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.conformal.rows import labelled_rows
from topk_registry.conformal import (
    LabelCounts,
    LabelSets,
    false_negative_control,
    false_negative_rates,
    marginal,
    risk_control,
)


def definition(probabilities, targets, alpha):
    """The largest threshold of those that change a set, by fractions, one after the other."""
    count = len(probabilities)
    best = -math.inf
    for threshold in [*sorted(set(probabilities[targets].tolist())), math.inf]:
        risk = Fraction(0)
        for p, y in zip(probabilities, targets, strict=True):
            if y.any():
                risk += Fraction(int((p[y] < threshold).sum()), int(y.sum()))
        if Fraction(count, count + 1) * risk / count + Fraction(1, count + 1) <= Fraction(str(alpha)):
            best = threshold
    return best


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.25, 0.5, 0.95])
@pytest.mark.parametrize("steps", [None, 4, 20])
def test_the_threshold_is_that_of_the_definition(alpha, steps):
    p, targets = labelled_rows(60, seed=round(100 * alpha))
    if steps is not None:  # ties
        p = np.round(p * steps) / steps
    assert false_negative_control(p, targets, alpha).threshold == definition(p, targets, alpha)


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_the_losses_of_all_thresholds_give_the_same(alpha):
    p, targets = labelled_rows(80)
    candidates = np.unique(p[targets])
    losses = np.stack([false_negative_rates(p >= t, targets) for t in candidates], -1)
    index = risk_control(losses, alpha)
    assert index is not None
    assert candidates[index] == false_negative_control(p, targets, alpha).threshold


def test_one_label_a_row_is_split_conformal_prediction():
    p, _ = labelled_rows(300)
    labels = np.random.default_rng(1).integers(0, p.shape[1], len(p))
    targets = np.arange(p.shape[1]) == labels[:, None]
    for alpha in (0.05, 0.1, 0.37):
        expected = -marginal(-p[targets], alpha)
        assert false_negative_control(p, targets, alpha).threshold == expected


def test_a_risk_that_equals_alpha_is_kept():
    """Three rows of three labels, each of which may miss one: (3 / 3 + 1) / 4 is a half, in fractions."""
    p = np.array([[0.1, 0.5, 0.9]] * 3)
    targets = np.ones_like(p, bool)
    assert false_negative_control(p, targets, 0.5).threshold == 0.5
    assert false_negative_control(p, targets, 0.49).threshold == 0.1
    # ten losses of a tenth are 1, where sums of floats have 0.9999999999999999
    rows, ones = np.arange(10.0)[None].repeat(10, 0) / 10, np.ones((10, 10))
    assert false_negative_control(rows, ones, 2 / 11 + 1e-12).threshold == 0.1


def test_too_few_samples_give_all_classes_and_say_how_many_more():
    p, targets = labelled_rows(7)
    sets = false_negative_control(p, targets, 0.1)
    assert (sets.threshold, sets.missing) == (-math.inf, 2)
    assert sets(p).all()
    assert sets.promise.endswith("sets have all classes, as alpha = 0.1 takes 2 samples more")
    enough = false_negative_control(*labelled_rows(9), 0.1)
    assert enough.missing == 0
    assert np.isfinite(enough.threshold)


def test_sets_are_empty_where_that_misses_too_little():
    p, targets = labelled_rows(40, unlabelled=1.0)
    targets[0, 3] = True
    sets = false_negative_control(p, targets, 0.2)  # (1 + 1) / 41 is below 0.2
    assert sets.threshold == math.inf
    assert not sets(p).any()
    assert sets.without_labels == 39
    assert false_negative_control(p, np.zeros_like(targets), 0.2).threshold == math.inf


def test_tensors_give_what_arrays_give():
    p, targets = labelled_rows(50)
    single = p.astype(np.float32)
    sets = false_negative_control(torch.from_numpy(single), torch.from_numpy(targets).float(), 0.1)
    assert sets == false_negative_control(single, targets, 0.1)
    inside = sets(torch.from_numpy(single))
    assert torch.equal(inside, torch.from_numpy(sets(single)))
    assert inside.numpy()[targets].sum() == (single[targets] >= sets.threshold).sum()


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        (np.zeros((3, 4)), np.zeros(3), r"one shape \[N, n\], a column for each class, got \[3, 4\] and \[3\]"),
        (np.zeros((2, 2)), np.full((2, 2), 0.5), "targets must be 0 or 1, got 0.5"),
        (np.full((2, 2), np.nan), np.zeros((2, 2)), "4 of 4 probabilities are no finite numbers"),
    ],
)
def test_what_is_refused(p, y, message):
    with pytest.raises(ValueError, match=message):
        false_negative_control(p, y, 0.1)


def test_losses_that_fall_or_exceed_their_bound_are_refused():
    with pytest.raises(ValueError, match="at most 1 that never fall"):
        risk_control([[0.5, 0.4]], 0.5)
    with pytest.raises(ValueError, match="at most 1 that never fall"):
        risk_control([[0.5, 1.4]], 0.5)
    with pytest.raises(ValueError, match="below the bound of the loss, 2, got 2"):
        risk_control([[0.5, 1.4]], 2, bound=2)
    with pytest.raises(ValueError, match=r"expected losses \[N, G\]"):
        risk_control([0.5], 0.5)
    assert risk_control([[0.0, 1.0]] * 9, 0.2, bound=2.0) == 0
    assert risk_control([[0.0, 1.0]] * 8, 0.2, bound=2.0) is None  # it takes 2 / 0.2 - 1 samples
    assert risk_control([[0.0, 1.0, 1.0]] * 5, 1.5, bound=2.0) == 2


N, ALPHA, SPLITS, POOL = 59, 0.1, 2000, 20_000


class Population:
    """Rows to draw from, and the exact risk of any threshold in all of them together."""

    def __init__(self, unlabelled):
        self.p, self.targets = labelled_rows(POOL, seed=5, unlabelled=unlabelled)
        row = np.nonzero(self.targets)[0]
        own, loss = self.p[self.targets], 1 / self.targets.sum(-1)[row]
        order = np.argsort(own)
        self.own, self.total = own[order], np.concatenate(([0.0], np.cumsum(loss[order]))) / POOL

    def risk(self, threshold):
        return self.total[np.searchsorted(self.own, threshold, side="left")]

    def risks(self, find):
        rng = np.random.default_rng(7)
        draws = (rng.choice(POOL, N) for _ in range(SPLITS))
        return np.array([self.risk(find(self.p[rows], self.targets[rows])) for rows in draws])


def error_of(risks):
    """3.29 standard errors: the mean of independent splits is further off with probability 0.001."""
    return 3.29 * risks.std() / math.sqrt(SPLITS)


@pytest.fixture(scope="module", params=[0.0, 0.3], ids=["all labelled", "some without labels"])
def population(request):
    return Population(request.param)


def test_the_mean_rate_over_calibrations_is_at_most_alpha_and_not_much_less(population):
    """Theorems 1 and 2 of the paper: alpha - 2 / (N + 1) <= expected loss <= alpha, for probabilities without ties."""
    assert len(np.unique(population.own)) == len(population.own)
    risks = population.risks(lambda p, y: false_negative_control(p, y, ALPHA).threshold)
    margin = error_of(risks)
    assert margin < 0.25 / (N + 1)  # the test can tell the two sides apart
    assert risks.mean() <= ALPHA + margin
    assert risks.mean() >= ALPHA - 2 / (N + 1) - margin


def test_this_test_sees_a_threshold_without_the_correction_for_one_more_sample(population):
    """R(t) <= alpha alone: one step too far."""

    naive = (ALPHA * N + 1) / (N + 1)  # N R(t) + 1 <= naive (N + 1) is R(t) <= ALPHA
    risks = population.risks(lambda p, y: false_negative_control(p, y, naive).threshold)
    assert risks.mean() > ALPHA + error_of(risks)


def test_and_one_that_is_too_careful(population):
    risks = population.risks(lambda p, y: false_negative_control(p, y, ALPHA - 2 / (N + 1)).threshold)
    assert risks.mean() < ALPHA - 2 / (N + 1) - error_of(risks)


def test_ties_only_lower_the_rate(population):
    coarse = Population.__new__(Population)
    coarse.__dict__.update(population.__dict__)
    coarse.p, coarse.own = np.round(population.p, 1), np.round(population.own, 1)
    risks = coarse.risks(lambda p, y: false_negative_control(p, y, ALPHA).threshold)
    assert risks.mean() < ALPHA


def test_what_sets_miss_is_summed_over_parts():
    p, targets = labelled_rows(200)
    inside = LabelSets(0.4, 0.1, 9)(p)
    whole = LabelCounts.of(inside, targets)
    parts = LabelCounts.of(inside[:70], targets[:70]) + LabelCounts.of(inside[70:], targets[70:])
    assert whole.summary() == pytest.approx(parts.summary())
    found = whole.summary()
    rates = [1 - (y & s).sum() / y.sum() if y.any() else 0.0 for s, y in zip(inside, targets, strict=True)]
    assert found["false_negative_rate"] == pytest.approx(np.mean(rates))
    assert found["mean_size"] == pytest.approx(inside.sum(-1).mean())
    assert found["median_size"] == np.median(inside.sum(-1))
    assert found["empty"] == np.mean(inside.sum(-1) == 0)
    assert whole.unlabelled == (targets.sum(-1) == 0).sum()
    low, high = whole.interval
    assert high - low == pytest.approx(2 * 1.96 * np.std(rates) / math.sqrt(200))
    metrics = pytest.importorskip("sklearn.metrics")
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(targets, inside, average="macro"))
    assert found["micro_f1"] == pytest.approx(metrics.f1_score(targets, inside, average="micro"))
    assert found["macro_recall"] == pytest.approx(metrics.recall_score(targets, inside, average="macro"))


@pytest.mark.parametrize(("losses", "bound"), [([[-math.inf]], 1.0), ([[0.0]], math.inf), ([[math.nan]], 1.0)])
def test_infinite_losses_and_bounds_are_refused(losses, bound):
    with pytest.raises(ValueError, match="finite number"):
        risk_control(np.array(losses), 0.1, bound=bound)


def test_what_sets_miss_is_counted_of_targets_of_0_and_1_alone():
    for wrong in (0.3, -1.0, math.nan):
        with pytest.raises(ValueError, match="targets must be 0 or 1"):
            LabelCounts.of(np.ones((1, 2), bool), np.array([[1.0, wrong]]))


def test_brain_floats_calibrate():
    values = torch.tensor([[0.5, 0.25]] * 30, dtype=torch.bfloat16)
    assert false_negative_control(values, torch.tensor([[1, 0]] * 30), 0.1).threshold == 0.5
