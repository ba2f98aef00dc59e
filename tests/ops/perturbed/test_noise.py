"""The noise is Gaussian and independent: the generator, its use, and the inverse of the distribution."""

import math

import mpmath
import numpy as np
import pytest
import torch

from tests.ops.compiled import for_python
from tests.ops.perturbed.noise import normals, philox, uniforms
from topk_registry.ops.perturbed import cpu, noise
from topk_registry.ops.perturbed.noise import table

# from tests/kat_vectors of Random123: counter, key, words after seven rounds
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers_of_philox(counter, key, expected):
    counter, key, expected = map(words, (counter, key, expected))
    assert np.array(philox(counter, key)).tolist() == expected.tolist()
    call, row = ((words[1].astype(np.uint64) << np.uint64(32)) | words[0] for words in (counter[:2], counter[2:]))
    row = ((row >> np.uint64(33)) << np.uint64(32)) | (row & np.uint64(0xFFFFFFFF))  # the lowest bit above is the use
    found = for_python(noise.philox)(call, row, np.uint64(counter[3] & 1), *key.astype(np.uint64))
    assert np.array(found, np.uint64).view(np.uint32).tolist() == expected.tolist()


def test_the_normal_of_a_uniform_is_right_to_1e_9_as_far_as_uniforms_go():
    spread = np.random.default_rng(0).integers(0, 2**64, 3000, np.uint64)
    u = np.concatenate([spread >> np.uint64(shift) for shift in range(0, 64, 3)])
    u = np.concatenate([u, ~u, np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)])
    z, normal, quantiles = normals(u), for_python(noise.normal), table().numpy()
    assert np.abs(np.array([normal(one, quantiles) for one in u]) - z).max() < 1e-9
    for one, its in zip(u[::997].tolist(), z[::997], strict=True):
        tail = mpmath.mpf(2) ** -64 * (one + mpmath.mpf(1) / 2)
        assert mpmath.erfc(mpmath.mpf(its) / mpmath.sqrt(2)) / 2 == pytest.approx(tail, rel=1e-12)


def test_the_bound_on_the_tail_is_one():
    x = np.concatenate([np.linspace(1e-9, 9.6, 5000), np.logspace(-8, 0, 100)]).astype(np.float32)
    bound = np.array([for_python(cpu.tail)(v) for v in x], np.float64)
    tail = np.array([math.erfc(v / math.sqrt(2)) / 2 for v in x.astype(np.float64)])
    assert (float(cpu.BYTES) / 256 * bound > tail).all()
    assert (bound[x < 3.3] < 1.11 * tail[x < 3.3]).all()  # what is too high costs time
    assert for_python(cpu.tail)(np.float32(np.inf)) < 2.0**-66  # no uniform is as small


@pytest.mark.parametrize("epsilon", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("shift", [0.0, 5000.0])
@pytest.mark.slow
def test_a_class_of_too_high_a_byte_does_not_reach_the_height(shift, epsilon):
    row = (np.random.default_rng(0).standard_normal(320) * 3 + shift).astype(np.float32)
    limit = np.zeros(320, np.uint8)
    for height in (np.quantile(row, [0.1, 0.7, 0.99]) + epsilon * np.array([[-4.0], [0.1], [4.0]])).ravel():
        height = np.float32(height)
        for_python(cpu.tails)(row, height, np.float32(1 / epsilon), limit)
        # the largest normal of a byte is that of its least uniform
        tail = (limit.astype(np.float64) + 1) / 256
        reached = row.astype(np.float64) + epsilon * (normal_beyond(tail) + 1e-9)
        assert ((reached < height) | (tail == 1)).all()


def normal_beyond(tail: np.ndarray) -> np.ndarray:
    return -torch.special.ndtri(torch.from_numpy(tail)).numpy()


DRAWS, ROWS, N = 40, 50, 1000
COUNT = DRAWS * ROWS * N


@pytest.fixture(scope="module")
def u() -> np.ndarray:
    return uniforms(0x123456789ABCDEF, DRAWS, ROWS, N)


@pytest.fixture(scope="module")
def z(u: np.ndarray) -> np.ndarray:
    return normals(u)


def test_moments(z):
    # E z^p is 0 or (p-1)!!, and its estimate has the variance E z^2p - (E z^p)^2 over the count
    for p in range(1, 9):
        mean = math.prod(range(p - 1, 0, -2)) if p % 2 == 0 else 0
        variance = math.prod(range(2 * p - 1, 0, -2)) - mean**2
        assert (z**p).mean() == pytest.approx(mean, abs=4.5 * (variance / COUNT) ** 0.5)


def test_kolmogorov_smirnov(z):
    x = torch.from_numpy(np.sort(z, axis=None))
    chance = torch.special.ndtr(x).numpy()
    steps = np.arange(COUNT + 1) / COUNT
    distance = max(np.abs(chance - steps[1:]).max(), np.abs(chance - steps[:-1]).max())
    assert distance * COUNT**0.5 < 2.0  # beyond with a chance of 7e-4


@pytest.mark.parametrize("height", [2.0, 3.0, 4.0, 4.5])
def test_tails(z, height):
    expected = COUNT * math.erfc(height / math.sqrt(2)) / 2
    for far in ((z > height).sum(), (z < -height).sum()):
        assert far == pytest.approx(expected, abs=4.5 * expected**0.5)


def test_every_byte_of_the_uniforms_is_uniform(u):
    for byte in u.ravel().view(np.uint8).reshape(-1, 8).T:
        counts = np.bincount(byte, minlength=256)
        chi_square = ((counts - COUNT / 256) ** 2).sum() / (COUNT / 256)
        assert abs(chi_square - 255) < 4.5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(
    ("axis", "distance"),
    [(0, 1), (1, 1), (2, 1), (2, 2), (2, 4), (2, 16), (2, 512)],
    ids=["draws", "rows", "classes", "classes 2 apart", "words", "16 apart", "halves"],
)
def test_draws_rows_and_classes_are_uncorrelated(z, axis, distance, power):
    x = np.swapaxes(z**power - (power - 1), 0, axis)
    x = x / x.std()
    products = x[distance:] * x[:-distance]
    assert products.mean() == pytest.approx(0, abs=4.5 * products.size**-0.5)


@pytest.mark.parametrize("other", [1, 2, 2**32, 2**62])
def test_seeds_are_uncorrelated(other):
    one, two = (normals(uniforms(seed, 8, 20, 1000)) for seed in (0, other))
    assert (one * two).mean() == pytest.approx(0, abs=4.5 * one.size**-0.5)
    assert ((one**2 - 1) * (two**2 - 1)).mean() == pytest.approx(0, abs=4.5 * 2 * one.size**-0.5)


def test_bytes_of_a_class_and_of_its_neighbours_are_jointly_uniform(u):
    top = (u >> np.uint64(60)).astype(np.int64)
    for pair in (top[..., :-1] * 16 + top[..., 1:], top[:-1] * 16 + top[1:], top[:, :-1] * 16 + top[:, 1:]):
        counts = np.bincount(pair.reshape(-1), minlength=256)
        chi_square = ((counts - pair.size / 256) ** 2).sum() / (pair.size / 256)
        assert abs(chi_square - 255) < 4.5 * (2 * 255) ** 0.5
