"""The built-in data: the same from a seed, balanced, and hard in the way it is meant to be."""

import hashlib
import pickle

import numpy as np
import pytest
from timm.data import create_loader

from topk_registry import registry
from topk_registry.data.hierarchy import Hierarchy


def digest(dataset):
    return hashlib.sha256(dataset.images.tobytes()).hexdigest()[:16]


def test_the_same_seed_is_the_same_data_on_every_machine():
    assert digest(Hierarchy("train", size=200)) == "d7378ee3ba5e49c3"


def test_it_is_found_by_name_as_any_plug_in():
    dataset = registry.datasets.create("hierarchy", split="validation", size=10)
    assert isinstance(dataset, Hierarchy)


def test_seeds_and_splits_differ():
    kept = {
        digest(Hierarchy(split, size=50, seed=seed)) for split in ("train", "validation", "test") for seed in (0, 1)
    }
    assert len(kept) == 6
    assert digest(Hierarchy("val", size=50)) == digest(Hierarchy("validation", size=50))


def test_a_larger_data_set_begins_with_the_smaller_one():
    small, large = Hierarchy(size=1030), Hierarchy(size=2100)
    assert np.array_equal(large.images[:1030], small.images)
    assert large.targets[:1030] == small.targets


def test_splits_share_their_classes_and_no_image():
    train, validation = (
        Hierarchy("train", size=400, pixel_noise=0.0),
        Hierarchy("validation", size=400, pixel_noise=0.0),
    )
    means = [np.stack([d.images[c::100].mean(0, dtype=float) for c in range(100)]) for d in (train, validation)]
    own = np.abs(means[0] - means[1]).mean()
    other = np.abs(means[0] - np.roll(means[1], 1, axis=0)).mean()
    assert own < 0.7 * other
    assert not (train.images == validation.images).all(axis=(1, 2, 3)).any()


def test_classes_take_turns_and_families_are_even():
    dataset = Hierarchy(size=5000)
    assert np.bincount(dataset.targets).tolist() == [50] * 100
    assert np.bincount(dataset.superclasses).tolist() == [5] * 20
    assert len(set(dataset.classes)) == 100


@pytest.mark.slow
def test_a_family_looks_alike():
    """Fine classes of one superclass are nearer each other than classes of different ones."""
    dataset = Hierarchy(size=2000, pixel_noise=0.5)
    means = np.stack([dataset.images[c::100].mean(0, dtype=float) for c in range(100)])
    distance = np.abs(means[:, None] - means[None]).mean(axis=(2, 3, 4))
    family = np.asarray(dataset.superclasses)
    same = (family[:, None] == family[None]) & ~np.eye(100, dtype=bool)
    assert distance[same].mean() < 0.6 * distance[family[:, None] != family[None]].mean()
    assert distance[same].min() > 0


def test_timms_loader_takes_it():
    loader = create_loader(Hierarchy(size=8), (3, 32, 32), 4, no_aug=True, use_prefetcher=False, num_workers=0)
    images, target = next(iter(loader))
    assert images.shape == (4, 3, 32, 32)
    assert target.tolist() == [0, 1, 2, 3]


def test_it_pickles_for_spawned_workers():
    dataset = pickle.loads(pickle.dumps(Hierarchy(size=3)))
    assert dataset[2][1] == 2


def test_a_split_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'trian'"):
        Hierarchy("trian")
