"""Wrong labels by kind: exactly as many as asked for, drawn from the seed, and of the kind that they are said to be."""

import numpy as np
import pytest

from topk_registry.data.hierarchy import Hierarchy
from topk_registry.data.labels import labels_of
from topk_registry.data.noise import (
    Annotator,
    annotated_labels,
    confused_labels,
    small_images,
    uniform_labels,
    weaker_model,
)

N, CLASSES = 6000, 20
LABELS = np.random.default_rng(0).integers(0, CLASSES, N)
FAMILIES = [c % 4 for c in range(CLASSES)]
NEAR = np.where(np.arange(CLASSES)[:, None] // 5 == np.arange(CLASSES) // 5, -1.0, -4.0)  # classes 0 to 4 are alike
LOG_P = (NEAR + 2 * np.eye(CLASSES))[LABELS]
LOG_P -= np.log(np.exp(LOG_P).sum(1, keepdims=True))

MAKERS = {
    "uniform": lambda share, seed: uniform_labels(LABELS, CLASSES, share, seed=seed),
    "confusions": lambda share, seed: confused_labels(LABELS, LOG_P, share, seed=seed),
    "annotators": lambda share, seed: annotated_labels(LABELS, FAMILIES, share, seed=seed),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.123, 0.5, 1.0])
def test_exactly_the_share_is_wrong(kind, share):
    found = MAKERS[kind](share, 3)
    assert (found != LABELS).sum() == round(share * N)
    assert found.dtype == LABELS.dtype
    assert found.min() >= 0
    assert found.max() < CLASSES


@pytest.mark.parametrize("kind", MAKERS)
def test_labels_come_from_the_seed(kind):
    before = LABELS.copy()
    one, again, other = (MAKERS[kind](0.4, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.array_equal(LABELS, before)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_out_of_range(kind, share):
    with pytest.raises(ValueError, match=r"label noise must be in \[0, 1\]"):
        MAKERS[kind](share, 0)


def test_uniform_labels_are_any_other_class():
    counts = np.bincount((MAKERS["uniform"](1.0, 0) - LABELS) % CLASSES, minlength=CLASSES)
    assert counts[0] == 0
    expected = N / (CLASSES - 1)
    assert np.abs(counts[1:] - expected).max() < 5 * np.sqrt(expected)


def test_confusions_are_those_of_the_model():
    found = MAKERS["confusions"](0.3, 0)
    wrong = found != LABELS
    p = np.exp(LOG_P)
    p[np.arange(N), LABELS] = 0.0
    near = (p * (np.arange(CLASSES) // 5 == LABELS[:, None] // 5)).sum(1) / p.sum(1)
    expected = near[wrong].mean()
    deviation = np.sqrt(expected * (1 - expected) / wrong.sum())
    assert abs((found // 5 == LABELS // 5)[wrong].mean() - expected) < 5 * deviation


def test_doubtful_samples_are_wrong_more_often():
    """Of two kinds of samples, doubted at odds of nine to one, nine in ten of few wrong labels are of the first."""
    log_p = np.log(np.where(np.arange(N)[:, None] % 2, [[0.1, 0.9]], [[0.9, 0.1]]))
    found = confused_labels(np.zeros(N, np.int64), log_p, 0.02, seed=0)
    wrong = np.flatnonzero(found)
    assert abs((wrong % 2).mean() - 0.9) < 5 * np.sqrt(0.09 / len(wrong))


def test_annotators_err_as_they_are_said_to():
    family = np.asarray(FAMILIES)
    found = annotated_labels(LABELS, FAMILIES, 0.3, seed=0, annotators=[Annotator(1.0, 1.0, 0.0)])
    wrong = found != LABELS
    assert (family[found] == family[LABELS]).all()
    for c in range(CLASSES):
        assert len(set(found[wrong & (c == LABELS)])) == 1  # the favourite of the class
    found = annotated_labels(LABELS, FAMILIES, 0.3, seed=0, annotators=[Annotator(1.0, 0.0, 1.0)])
    assert (family[found] == family[LABELS]).all()
    anywhere = annotated_labels(LABELS, FAMILIES, 0.3, seed=0, annotators=[Annotator(1.0, 0.0, 0.0)])
    assert (family[anywhere] != family[LABELS]).mean() > 0.2
    alone = annotated_labels(LABELS, list(range(CLASSES)), 0.3, seed=0)  # families of one class
    assert (alone != LABELS).sum() == round(0.3 * N)


def test_a_careless_annotator_has_most_of_the_wrong_labels():
    """Rates of 1 and 9, one within the family and one anywhere: nine in ten of few wrong labels are anywhere."""
    two = [Annotator(1.0, 0.0, 1.0), Annotator(9.0, 0.0, 0.0)]
    found = annotated_labels(LABELS, FAMILIES, 0.05, seed=0, annotators=two)
    wrong = found != LABELS
    outside = np.asarray(FAMILIES)[found[wrong]] != np.asarray(FAMILIES)[LABELS[wrong]]
    expected = 0.9 * 15 / 19  # 15 of the 19 other classes are of other families
    assert abs(outside.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / wrong.sum())


def test_the_weaker_model_learns_and_is_weak():
    data = Hierarchy("train", size=2000, superclasses=4, fine=5)
    labels = labels_of(data)
    rows = small_images(data, np.arange(2000))
    assert rows.shape == (2000, 48)
    assert data.transform is None
    log_p = weaker_model(rows, labels, 20, seed=0)
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1.0)
    right = (log_p.argmax(1) == labels).mean()
    assert 0.1 < right < 0.9  # 0.05 by chance
    assert np.exp(log_p.max(1)).mean() == pytest.approx(right, abs=0.15)  # it knows how often it is right
    order = np.random.default_rng(0).permutation(20)  # classes by other numbers are confused alike
    again = weaker_model(rows, order[labels], 20, seed=0)
    np.testing.assert_allclose(again[:, order], log_p, rtol=1e-6, atol=1e-6)


def test_a_single_sample_has_no_weaker_model():
    with pytest.raises(ValueError, match=r"a weaker model needs at least 2 samples.*got 1"):
        weaker_model(np.ones((1, 3)), np.array([0]), 2, seed=0)
