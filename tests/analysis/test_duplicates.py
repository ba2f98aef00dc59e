import hashlib
import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from topk_registry.analysis import duplicate_groups, picture_hash
from topk_registry.analysis import duplicates as module


def picture(seed, side=96):
    """A smooth random picture."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def recompressed(image):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=60)
    return Image.open(io.BytesIO(buffer.getvalue()))


def groups(images, labels, **options):
    contents = [hashlib.sha256(image.tobytes()).digest() for image in images]
    return duplicate_groups(
        contents, np.stack([picture_hash(image) for image in images]), np.asarray(labels), **options
    )


def test_copies_are_found_and_differing_labels_come_first():
    a, b, c = picture(0), picture(1), picture(2)
    images = [a, b, a.copy(), c, recompressed(b), b.resize((48, 48)), *map(picture, range(3, 40))]
    found = groups(images, [0, 1, 0, 2, 1, 3, *([0] * 37)])
    assert [(group.members, group.exact, group.labels_differ) for group in found] == [
        ((1, 4, 5), False, True),
        ((0, 2), True, False),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_small_changes_of_a_picture_change_few_bits(seed):
    image = picture(seed)
    bits = np.unpackbits(picture_hash(image))
    for changed in (recompressed(image), image.resize((60, 60)), ImageEnhance.Brightness(image).enhance(0.8)):
        assert (np.unpackbits(picture_hash(changed)) != bits).sum() <= module.DISTANCE
    others = [np.unpackbits(picture_hash(picture(100 + other))) for other in range(20)]
    assert min((other != bits).sum() for other in others) > 4 * module.DISTANCE


@pytest.mark.parametrize("distance", [0, 1, 4, 9])
def test_near_hashes_are_those_that_every_pair_finds(distance, monkeypatch):
    monkeypatch.setattr(module, "COMPARED", 64)
    rng = np.random.default_rng(distance)
    seeds = rng.integers(0, 2, (30, 128))
    bits = np.concatenate([seeds ^ (rng.random((30, 128)) < share) for share in (0.0, 0.01, 0.05)]).astype(np.uint8)
    hashes = np.packbits(bits, axis=1)
    near = (bits[:, None] != bits[None]).sum(axis=2) <= distance
    for _ in range(8):  # chains
        near = near @ near
    expected = {tuple(np.flatnonzero(row).tolist()) for row in near if row.sum() > 1}
    found = duplicate_groups([bytes([i]) for i in range(90)], hashes, np.zeros(90, int), distance=distance)
    assert {group.members for group in found} == expected
    assert not any(group.exact or group.labels_differ for group in found)


def test_arguments_that_do_not_fit_are_refused():
    assert duplicate_groups([], np.zeros((0, 16), np.uint8), np.zeros(0, int)) == []
    with pytest.raises(ValueError, match="got 1, 2, 2"):
        duplicate_groups([b""], np.zeros((2, 16), np.uint8), np.zeros(2, int))
    with pytest.raises(ValueError, match="distance must be in"):
        duplicate_groups([b""], np.zeros((1, 16), np.uint8), np.zeros(1, int), distance=64)
