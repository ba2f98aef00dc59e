"""A data set with a known posterior: the posterior by its definition, and the labels by the posterior."""

import math

import numpy as np
import pytest

from topk_studies.data.ambiguous import Ambiguous, _log_levels

SMALL = {
    "families": 3,
    "fine": 2,
    "side": 1,
    "feature_noise": 1.5,
    "ambiguity": 0.3,
    "imbalance": 4.0,
    "label_noise": 0.25,
}


def gaussian(low, high, mean, deviation):
    def below(x):
        return 0.5 * (1 + math.erf((x - mean) / (deviation * math.sqrt(2))))

    return below(high) - below(low)


def by_definition(data, index):
    """p(label | x) of one sample: the joint probability of every label, code and level, summed by loops."""
    scale, n, families = data._scale, len(data.classes), len(data._family_codes)

    def q(x, code):
        product = 1.0
        for level, u in zip(x, code, strict=True):
            low = -math.inf if level == 0 else level - 0.5
            high = math.inf if level == 255 else level + 0.5
            product *= gaussian(low, high, 127.5 + scale * u, scale * data.noise)
        return product

    x = [int(level) for level in data.images[index].ravel()]
    joint = [0.0] * n
    for c in range(n):
        density = (1 - data.ambiguity) * q(x, data._codes[c]) + data.ambiguity * q(x, data._family_codes[c % families])
        for label in range(n):
            stays = (1 - data.label_noise) * (label == c)
            redrawn = data.label_noise / data.fine * (label % families == c % families)
            joint[label] += data._prior[c] * density * (stays + redrawn)
    return np.array(joint) / sum(joint)


@pytest.mark.parametrize(
    "changes", [{}, {"ambiguity": 0.0}, {"ambiguity": 1.0}, {"label_noise": 1.0}, {"feature_noise": 0.4}]
)
def test_the_posterior_is_its_definition(changes):
    data = Ambiguous("test", size=20, **{**SMALL, **changes})
    found = data.posterior()
    for index in range(20):
        np.testing.assert_allclose(found[index], by_definition(data, index), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("mean", "deviation"), [(100.0, 30.0), (10.0, 5.0), (127.5, 0.5), (200.0, 200.0)])
def test_the_levels_are_all_there_is(mean, deviation):
    assert sum(map(math.exp, _log_levels(mean, deviation))) == pytest.approx(1.0, abs=1e-12)


def test_labels_are_drawn_from_the_posterior():
    """Over any function of x, labels and posterior agree within four standard errors."""
    data = Ambiguous("train", size=40_000, **SMALL)
    p, labels = data.posterior(), np.asarray(data.targets)
    hit = np.eye(p.shape[1])[labels]
    for weight in (np.ones(len(p)), data.images[:, 0, 0, 0] / 255, p.max(axis=1), p[:, 0] > 0.3):
        residual = weight[:, None] * (hit - p)
        error = np.sqrt((weight[:, None] ** 2 * p * (1 - p)).sum(axis=0))
        assert (np.abs(residual.sum(axis=0)) <= 4 * error + 1e-9).all()
    frequencies = hit.mean(axis=0)
    assert (np.abs(frequencies - data.frequencies) <= 4 * np.sqrt(data.frequencies / len(p))).all()
    assert data._prior[0] / data._prior[-1] == pytest.approx(4.0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_no_guess_is_better_than_bayes(k):
    """The expected error of k guesses, and its mean over classes, is least for the k largest of the posterior."""
    data = Ambiguous("test", size=500, **SMALL)
    p, frequencies = data.posterior(), data.frequencies

    def error(guesses, weight):
        return 1 - np.take_along_axis(p * weight, guesses, axis=1).sum(1).mean()

    by_p, by_ratio = (np.argsort(-x, axis=1)[:, :k] for x in (p, p / frequencies))
    macro = 1 / (p.shape[1] * frequencies)
    assert error(by_p, 1.0) == pytest.approx(data.bayes_error(k), abs=1e-12)
    assert error(by_ratio, macro) == pytest.approx(data.bayes_error(k, macro=True), abs=1e-12)
    assert error(by_ratio, 1.0) > data.bayes_error(k)
    assert error(by_p, macro) > data.bayes_error(k, macro=True)
    missed = 1 - (by_p == np.asarray(data.targets)[:, None]).any(axis=1)  # what the labels show
    assert missed.mean() == pytest.approx(data.bayes_error(k), abs=4 * math.sqrt(0.25 / 500))


def test_all_classes_leave_no_error():
    data = Ambiguous("test", size=50, **SMALL)
    assert data.bayes_error(6) == pytest.approx(0.0, abs=1e-12)
    assert data.bayes_error(6, macro=True) < 0.2  # the samples at hand are not exactly of the classes' frequencies


def test_a_larger_set_begins_with_the_smaller_one_and_splits_differ():
    small, large = Ambiguous(size=50), Ambiguous(size=1500)
    assert (small.images == large.images[:50]).all()
    assert small.targets == large.targets[:50]
    assert (Ambiguous("test", size=50).images != small.images).any()
    image, label = small[3]
    assert (image.size, label) == ((8, 8), small.targets[3])


def test_ten_thousand_classes_are_one_matrix_product():
    data = Ambiguous("test", size=200, families=2000, fine=5, imbalance=100.0)
    p = data.posterior()
    assert p.shape == (200, 10_000)
    np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-9)
    assert 0 < data.bayes_error(5) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"split": "nope"}, "train, validation, test, got 'nope'"), ({"families": 1, "fine": 1}, "2 classes")],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Ambiguous(**options)


def test_it_is_registered():
    from topk_registry import registry

    assert registry.datasets.builder("ambiguous") is Ambiguous
