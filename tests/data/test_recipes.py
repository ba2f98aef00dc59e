"""Label noise, long tails, subsets and held-out parts, against their definitions."""

import numpy as np
import pytest

from topk_registry.data.recipes import Selection, fraction_counts, hold_out, long_tail_counts, noisy_labels, pick

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 20, 40_000)
FAMILIES = [c % 4 for c in range(20)]


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_noise_stays_within_the_superclass_at_its_rate(p):
    noisy = noisy_labels(LABELS, FAMILIES, p, seed=3)
    family = np.asarray(FAMILIES)
    assert (family[noisy] == family[LABELS]).all()
    # one in five of the labels that are drawn anew is drawn as it was; five standard deviations of a binomial share
    expected = p * 4 / 5
    assert abs((noisy != LABELS).mean() - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(LABELS))


def test_full_noise_is_uniform_within_the_superclass():
    noisy = noisy_labels(LABELS, FAMILIES, 1.0, seed=3)
    for c in range(20):
        counts = np.bincount(noisy[c == LABELS], minlength=20)
        members = counts[FAMILIES[c] :: 4]
        assert members.sum() == counts.sum()
        expected = counts.sum() / 5
        assert np.abs(members - expected).max() < 5 * np.sqrt(expected)


def test_noise_comes_from_the_seed():
    one, again, other = (noisy_labels(LABELS, FAMILIES, 0.5, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("profile", ["exp", "pareto"])
def test_a_long_tail_falls_from_all_to_a_factor_less(profile):
    counts = long_tail_counts([5000] * 100, profile, 100.0)
    assert (counts[0], counts[-1]) == (5000, 50)
    assert counts == sorted(counts, reverse=True)


def test_the_profiles_are_their_formulas():
    exponential, pareto = (long_tail_counts([10_000] * 11, profile, 64.0) for profile in ("exp", "pareto"))
    assert exponential[5] == round(10_000 * 64**-0.5) == 1250
    assert pareto[5] == round(10_000 * (1 + 0.5 * (64 ** (1 / 6) - 1)) ** -6) == 878
    assert long_tail_counts([10_000] * 11, "exp", 1.0) == [10_000] * 11


def test_a_long_tail_takes_no_more_than_there_is_and_leaves_one():
    assert long_tail_counts([10, 2, 10], "exp", 1000.0) == [10, 1, 1]
    assert long_tail_counts([10, 2, 10], "exp", 1.5)[1] == 2


def test_fractions_are_of_each_class():
    assert fraction_counts([100, 10, 3, 0], 0.1) == [10, 1, 1, 0]


def test_picking_is_random_exact_and_nested():
    counts = [7 * c for c in range(20)]
    chosen = pick(LABELS, counts, seed=1)
    assert np.bincount(LABELS[chosen], minlength=20).tolist() == counts
    assert len(set(chosen.tolist())) == len(chosen)
    more = pick(LABELS, [count + 1 for count in counts], seed=1)
    assert set(chosen.tolist()) < set(more.tolist())
    assert not np.array_equal(chosen, pick(LABELS, counts, seed=2))


def test_what_is_held_out_is_balanced_and_disjoint():
    counts = np.bincount(LABELS)
    rest, held = hold_out(LABELS, counts.tolist(), 0.25, seed=0)
    assert np.bincount(LABELS[held]).tolist() == [round(0.25 * c) for c in counts]
    assert sorted([*rest.tolist(), *held.tolist()]) == list(range(len(LABELS)))


class Items:
    """Ten items whose image is their index; item 3 cannot be read, and its neighbour comes in its place."""

    transform = None
    classes = ("a", "b")

    def __getitem__(self, index):
        index = 4 if index == 3 else index
        return index, index % 2


@pytest.mark.parametrize("folds", [2, 4, 5])
def test_folds_hold_out_every_sample_once_where_the_classes_divide(folds):
    labels = np.repeat(np.arange(3), [20, 40, 60])
    held = [hold_out(labels, [20, 40, 60], 1 / folds, seed=7, fold=fold)[1] for fold in range(folds)]
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(120))
    assert np.array_equal(held[0], hold_out(labels, [20, 40, 60], 1 / folds, seed=7)[1])


def test_folds_of_a_small_class_hold_out_one_of_it_each():
    labels = np.array([0, 0, 1, 1, 1, 1, 1, 1, 1])
    held = [hold_out(labels, [2, 7], 0.2, seed=1, fold=fold)[1] for fold in range(5)]
    assert all((labels[part] == c).sum() == 1 for part in held for c in (0, 1))
    assert {index for part in held for index in part if index < 2} == {0, 1}


def test_a_selection_keeps_a_substitutes_own_label():
    labels = np.arange(10) % 2
    selection = Selection(Items(), np.asarray([1, 3, 6]), labels, noisy=1 - labels)
    assert [selection[i] for i in range(len(selection))] == [(1, 0), (4, 0), (6, 1)]
    assert selection.targets.tolist() == [0, 0, 1]
    assert selection.classes == ("a", "b")
    selection.transform = str
    assert selection.dataset.transform is str


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: noisy_labels(LABELS, FAMILIES, 1.1, seed=0),
        lambda: long_tail_counts([1], "exp", 0.9),
        lambda: long_tail_counts([1], "zipf", 2.0),
        lambda: fraction_counts([1], 0.0),
        lambda: hold_out(LABELS, [1], 1.0, seed=0),
    ],
)
def test_wrong_arguments_say_what_was_expected(wrong):
    with pytest.raises(ValueError, match="must be"):
        wrong()
