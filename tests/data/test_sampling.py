"""How often samples come: the four laws, and draws that keep them."""

import math

import numpy as np
import pytest
from timm.loss import compute_class_weights

from topk_registry.data.sampling import LAWS, Draw, expected_copies
from topk_registry.train.config.sampling import SAMPLERS

COUNTS = np.array([400, 0, 131, 40, 17, 6, 1])
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))
N = len(LABELS)


def of_class(copies):
    """The copies that all samples of each class have together [n]."""
    return np.bincount(LABELS, weights=copies, minlength=len(COUNTS))


def test_the_flags_name_the_laws():
    assert ("instance", *LAWS) == SAMPLERS


def test_class_balanced_and_square_root():
    has = COUNTS > 0
    assert of_class(expected_copies(LABELS, "class_balanced"))[has] == pytest.approx(N / 6)
    root = np.sqrt(COUNTS)
    assert of_class(expected_copies(LABELS, "sqrt")) == pytest.approx(N * root / root.sum())


@pytest.mark.parametrize("beta", [0.5, 0.999, 1 - 1e-9])
def test_effective_numbers_are_those_of_the_weights(beta):
    """A class is as frequent as the weights that timm computes would make it count."""
    copies = expected_copies(LABELS, "effective_num", beta=beta)
    _, weights = compute_class_weights(COUNTS.tolist(), N, method="effective_num", beta=beta)
    wanted = COUNTS * weights.numpy().astype(np.float64)
    assert of_class(copies) == pytest.approx(N * wanted / wanted.sum(), rel=1e-5)


def test_repeat_factors_are_those_of_the_paper():
    copies = expected_copies(LABELS, "repeat_factor", threshold=0.1)
    for label, found in zip(LABELS, copies, strict=True):
        assert found == pytest.approx(max(1.0, math.sqrt(0.1 / (COUNTS[label] / N))))
    assert expected_copies(LABELS, "repeat_factor", threshold=1 / N).tolist() == [1.0] * N
    assert len(Draw(LABELS, copies)) == math.floor(copies.sum()) > N


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("seed", range(5))
def test_an_epoch_rounds_each_expectation_down_or_up(law, seed):
    copies = expected_copies(LABELS, law, threshold=0.1)
    draw = Draw(LABELS, copies)
    found = np.bincount(draw(np.random.default_rng(seed)), minlength=N)
    assert found.sum() == len(draw)
    assert len(draw) == (N if law != "repeat_factor" else math.floor(copies.sum()))
    per_mark = copies / draw.distance
    assert (found >= np.floor(per_mark - 1e-9)).all()
    assert (found <= np.ceil(per_mark + 1e-9)).all()
    share = of_class(per_mark)
    assert (of_class(found) >= np.floor(share - 1e-9)).all()
    assert (of_class(found) <= np.ceil(share + 1e-9)).all()


@pytest.mark.parametrize("law", LAWS)
def test_each_sample_comes_as_often_as_expected_on_average(law):
    """An exact binomial interval for each sample: whether its expectation is rounded up is a coin of known chance."""
    from scipy.stats import binom

    draw = Draw(LABELS, expected_copies(LABELS, law, threshold=0.1))
    rng, epochs = np.random.default_rng(7), 400
    found = sum(np.bincount(draw(rng), minlength=N) for _ in range(epochs))
    expected = draw.copies / draw.distance
    below = np.floor(expected)
    ups = found - epochs * below
    low, high = (binom.ppf(p, epochs, expected - below) for p in (1e-7, 1 - 1e-7))
    assert ((ups >= low - 1) & (ups <= high + 1)).all()
    if law != "repeat_factor":  # of which some expect whole numbers
        assert len(np.unique(ups)) > 3


def test_an_epoch_is_in_random_order():
    draw = Draw(LABELS, expected_copies(LABELS, "class_balanced"))
    halves = [LABELS[draw(np.random.default_rng(seed))[: N // 2]] for seed in range(20)]
    shares = np.mean([np.bincount(half, minlength=len(COUNTS)) for half in halves], 0) / (N // 2)
    assert shares[COUNTS > 0] == pytest.approx(1 / 6, abs=0.02)
    assert not np.array_equal(draw(np.random.default_rng(0)), draw(np.random.default_rng(1)))
    assert np.array_equal(draw(np.random.default_rng(0)), draw(np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("law", "settings", "message"),
    [
        ("rare", {}, "the law must be one of class_balanced, sqrt, effective_num, repeat_factor, got 'rare'"),
        ("effective_num", {"beta": 1.0}, "beta must be in"),
        ("repeat_factor", {"threshold": 0.0}, "the threshold must be in"),
    ],
)
def test_what_cannot_be_meant_is_refused(law, settings, message):
    with pytest.raises(ValueError, match=message):
        expected_copies(LABELS, law, **settings)
