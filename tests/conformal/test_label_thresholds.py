"""Thresholds by F1, against all cut points by hand and against scikit-learn."""

import numpy as np
import pytest
import torch

from tests.conformal.rows import labelled_rows
from topk_registry.conformal import best_f1


def by_hand(values, labels):
    """The largest cut point of the largest F1, one after the other."""
    best = (-1.0, -np.inf)
    for cut in set(values.tolist()):
        chosen = values >= cut
        f1 = 2 * (chosen & labels).sum() / (chosen.sum() + labels.sum())
        best = max(best, (f1, cut))
    return best


@pytest.mark.parametrize("steps", [None, 3, 10])
def test_every_cut_point_is_looked_at(steps):
    p, targets = labelled_rows(120, 6, seed=3)
    if steps is not None:
        p = np.round(p * steps) / steps
    found = best_f1(p, targets)
    for c in range(6):
        assert (found.f1[c], found.values[c]) == by_hand(p[:, c], targets[:, c])
    assert (found.positives == targets.sum(0)).all()


def test_scikit_learn_finds_the_same():
    metrics = pytest.importorskip("sklearn.metrics")
    p, targets = labelled_rows(150, 5, seed=4)
    found = best_f1(p, targets)
    for c in range(5):
        precision, recall, cuts = metrics.precision_recall_curve(targets[:, c], p[:, c])
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
        assert found.f1[c] == pytest.approx(f1.max(), rel=1e-12)
        assert found.values[c] == cuts[np.flatnonzero(f1[:-1] > f1.max() - 1e-12).max()]
    chosen = found(p)
    assert found.f1 == pytest.approx(metrics.f1_score(targets, chosen, average=None))


def test_a_class_without_labels_falls_back():
    p, targets = labelled_rows(50, 4)
    targets[:, 2] = False
    found = best_f1(p, targets)
    assert found.values[2] == 0.5
    assert np.isnan(found.f1[2])
    assert found.fallen_back.tolist() == [2]
    assert best_f1(p, targets, fallback=0.9).values[2] == 0.9


def test_a_class_that_every_row_has_is_always_chosen():
    p = np.array([[0.3], [0.2], [0.6]])
    assert best_f1(p, np.ones_like(p)).values.tolist() == [0.2]


def test_tensors_give_what_arrays_give():
    p, targets = labelled_rows(40, 3)
    single = p.astype(np.float32)
    found, expected = best_f1(torch.from_numpy(single), torch.from_numpy(targets)), best_f1(single, targets)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found(torch.from_numpy(single)).numpy(), expected(single))
    # the row that gave a threshold is chosen by it, in single precision too
    assert (found(single) & (single == found.values.astype(np.float32))).any(0).all()
