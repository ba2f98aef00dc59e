"""Label noise, long tails, subsets, held-out parts and class numbers, against their definitions."""

import numpy as np
import pytest
import torch

from topk_registry.data import Selection, class_balanced_epoch, hold_out, long_tail, renumber, subset, with_label_noise
from topk_registry.data.selection import family_noise, long_tail_counts, uniform_noise
from topk_registry.errors import UnreadableImageError

LABELS = np.random.default_rng(0).integers(0, 20, 40_000)
FAMILIES = [c % 4 for c in range(20)]


class Items:
    """Samples whose image is their index; some cannot be read."""

    transform = None

    def __init__(self, labels, unreadable=()):
        self.targets, self.broken = labels, set(unreadable)
        self.classes = [f"c{i}" for i in range(20)]
        self.superclasses = FAMILIES

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        if index in self.broken:
            raise UnreadableImageError(f"cannot read {index}")
        return index, self.targets[index]


@pytest.fixture
def items():
    return Items(LABELS)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_family_noise_stays_within_the_superclass_at_its_rate(p):
    noisy = family_noise(LABELS, FAMILIES, p, seed=3)
    family = np.asarray(FAMILIES)
    assert (family[noisy] == family[LABELS]).all()
    # one in five of the labels that are drawn anew is drawn as it was; five standard deviations of a binomial share
    expected = p * 4 / 5
    assert abs((noisy != LABELS).mean() - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(LABELS))
    if p == 1:
        for c in range(20):
            members = np.bincount(noisy[c == LABELS], minlength=20)[FAMILIES[c] :: 4]
            assert np.abs(members - members.mean()).max() < 5 * np.sqrt(members.mean())


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_uniform_noise_changes_exactly_its_share_to_any_other_class(share):
    noisy = uniform_noise(LABELS, 20, share, seed=3)
    assert (noisy != LABELS).sum() == round(share * len(LABELS))
    if share == 1:
        counts = np.bincount((noisy - LABELS) % 20, minlength=20)[1:]
        assert np.abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())


def test_noise_comes_from_the_seed():
    for noise in (
        lambda s: family_noise(LABELS, FAMILIES, 0.5, seed=s),
        lambda s: uniform_noise(LABELS, 20, 0.5, seed=s),
    ):
        assert np.array_equal(noise(1), noise(1))
        assert not np.array_equal(noise(1), noise(2))


class Pairs(list):
    """A data set without names of its classes."""

    transform = None


def test_noise_of_a_data_set_keeps_the_true_labels(items):
    noisy = with_label_noise(items, 0.5)
    assert (noisy.true_targets == LABELS).all()
    assert 0.35 < (noisy.targets != LABELS).mean() < 0.45
    assert [noisy[i] for i in range(50)] == [(i, noisy.targets[i]) for i in range(50)]
    assert "(family)" in noisy.notes[0]
    items.superclasses = None
    assert "(uniform)" in with_label_noise(items, 0.5).notes[0]
    without_names = Pairs((None, i % 3) for i in range(60))
    assert {int(target) for _, target in with_label_noise(without_names, 1.0)} == {0, 1, 2}
    with pytest.raises(ValueError, match="superclasses"):
        with_label_noise(items, 0.5, kind="family")
    with pytest.raises(ValueError, match="uniform, or family"):
        with_label_noise(items, 0.5, kind="other")
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        with_label_noise(items, 1.5)


def test_a_long_tail_falls_to_a_factor_of_the_first_class(items):
    counts = long_tail_counts([5000] * 100, 100.0)
    assert (counts[0], counts[-1]) == (5000, 50)
    assert counts == sorted(counts, reverse=True)
    assert long_tail_counts([10_000] * 11, 64.0)[5] == round(10_000 * 64**-0.5) == 1250
    assert long_tail_counts([10_000] * 11, 1.0) == [10_000] * 11
    assert long_tail_counts([10, 2, 10], 1000.0) == [10, 1, 1]
    with pytest.raises(ValueError, match="at least 1"):
        long_tail_counts([10, 10], 0.5)
    thin = long_tail(items, 10)
    assert np.bincount(thin.targets).tolist() == long_tail_counts(np.bincount(LABELS).tolist(), 10)
    assert all(thin[i] == (thin.indices[i], LABELS[thin.indices[i]]) for i in range(0, len(thin), 97))


def test_subsets_are_exact_nested_and_of_each_class(items):
    small, large = subset(items, 0.1, seed=1), subset(items, 0.2, seed=1)
    counts = np.bincount(LABELS)
    assert np.bincount(small.targets).tolist() == [round(0.1 * c) for c in counts]
    assert set(small.indices.tolist()) < set(large.indices.tolist())
    assert not np.array_equal(small.indices, subset(items, 0.1, seed=2).indices)


def test_a_held_out_part_is_balanced_and_has_true_labels(items):
    noisy = with_label_noise(items, 1.0)
    rest, held = hold_out(noisy, 0.25)
    assert np.bincount(noisy.targets[held.indices]).tolist() == [round(c / 4) for c in np.bincount(noisy.targets)]
    assert (held.targets == LABELS[held.indices]).all()
    assert (rest.targets == noisy.targets[rest.indices]).all()
    assert sorted([*rest.indices.tolist(), *held.indices.tolist()]) == list(range(len(LABELS)))


def test_a_class_of_one_image_stays_in_the_rest():
    data = Items(np.array([0, 0, 0, 0, 1]))
    rest, held = hold_out(data, 0.5)
    assert 4 in rest.indices
    assert len(held) == 2


def test_changes_of_changes_refer_to_the_data_set(items):
    both = with_label_noise(long_tail(subset(items, 0.5), 4), 0.5)
    assert both.dataset is items
    assert (both.true_targets == LABELS[both.indices]).all()
    assert len(both.notes) == 3
    assert both[7] == (both.indices[7], both.targets[7])


def test_class_numbers_are_changed_and_unknown_classes_dropped(items):
    other = renumber(items, {0: 2, 5: 0}, ["five", "new", "zero"])
    assert set(other.targets.tolist()) == {0, 2}
    assert all((LABELS[i] == 0) == (y == 2) for i, y in zip(other.indices, other.targets, strict=True))
    assert other.classes == ["five", "new", "zero"]
    k_hot = Items(np.eye(3, dtype=np.float32)[[0, 1, 2]])
    moved = renumber(k_hot, {0: 1, 2: 0}, ["two", "zero"])
    assert moved.targets.tolist() == [[0, 1], [0, 0], [1, 0]]
    assert torch.equal(moved[0][1], torch.tensor([0.0, 1.0]))


def test_the_next_image_of_the_selection_replaces_an_unreadable_one(capsys):
    data = Items(np.arange(10), unreadable=[3, 4])
    part = Selection(data, np.array([1, 3, 4, 7]), targets=np.array([5, 6, 7, 8]))
    assert [part[i] for i in range(4)] == [(1, 5), (7, 8), (7, 8), (7, 8)]
    assert (list(zip(range(9), part, strict=False))[-1], part[-1]) == ((3, (7, 8)), (7, 8))  # a loop ends
    assert capsys.readouterr().err.count("cannot read") == 2
    with pytest.raises(UnreadableImageError, match="consecutive images"):
        Selection(data, np.array([3, 4]))[0]


def test_without_substitutes_an_unreadable_image_has_no_label(capsys):
    data = Items(np.arange(10), unreadable=[3, 4])
    part = Selection(data, np.array([1, 3, 4, 7]), targets=np.array([5, 6, 7, 8]))
    part.substitutes = False
    assert [part[i] for i in range(4)] == [(1, 5), (7, -100), (7, -100), (7, 8)]
    assert capsys.readouterr().err.count("left it out") == 2
    assert renumber(part, {5: 0, 6: 1}, ["a", "b"])[1] == (1, -100)
    k_hot = Selection(data, np.array([3, 7]), targets=np.eye(2, dtype=np.float32))
    k_hot.substitutes = False
    assert [k_hot[i][1].tolist() for i in range(2)] == [[-100, -100], [0, 1]]


def test_a_class_balanced_epoch_has_all_classes_equally_often():
    labels = np.repeat([0, 1, 2], [90, 9, 3])
    rng = np.random.default_rng(0)
    epochs = [class_balanced_epoch(labels, rng) for _ in range(200)]
    counts = np.array([np.bincount(labels[epoch], minlength=3) for epoch in epochs])
    assert {len(epoch) for epoch in epochs} == {102}
    assert (np.abs(counts - 34) <= 1).all()
    samples = np.array([np.bincount(epoch, minlength=102) for epoch in epochs])
    assert (samples[:, 99:] >= 11).all()
    assert (samples[:, :90] <= 1).all()
    assert samples[:, :90].mean() == pytest.approx(34 / 90, abs=0.01)  # 200 draws of each
