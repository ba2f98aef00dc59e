"""Selection of the largest scores of a row, compared with a stable sort of all scores."""

import numpy as np
import pytest

from tests.ops.compiled import for_python
from topk_registry.ops.cpu import masks, select

selected, places_from = map(for_python, (select.largest, masks.places_from))


def check(row, T):
    """Compare with a stable sort, which also puts the lower class first among equal scores."""
    row = np.pad(row.astype(np.float32), (0, -len(row) % 64), constant_values=-np.inf)
    top, where = np.empty(T, np.float32), np.empty(T, np.int64)
    selected(row, top, where)
    expected = np.argsort(-row, kind="stable")[:T]
    np.testing.assert_array_equal(top, row[expected])
    np.testing.assert_array_equal(where, expected)


@pytest.mark.parametrize("order", ["rising", "falling", "random", "equal", "few values", "holes", "one position"])
@pytest.mark.parametrize(("n", "T"), [(2, 1), (64, 64), (127, 3), (200, 16), (300, 17), (1000, 5), (3000, 64)])
def test_the_largest_of_a_row(n, T, order):
    generator = np.random.default_rng(0)
    check(
        {
            "rising": np.arange(n),
            "falling": -np.arange(n),
            "random": generator.standard_normal(n),
            "equal": np.zeros(n),
            "few values": generator.integers(0, 3, n),
            "holes": np.where(generator.random(n) < 0.01, -np.inf, generator.standard_normal(n)),
            "one position": np.where(np.arange(n) % 64 == 7, np.arange(n), -np.inf),
        }[order],
        T,
    )


@pytest.mark.parametrize(("n", "T"), [(64, 3), (256, 5), (256, 50), (1000, 11), (1000, 60)])
@pytest.mark.parametrize("spread", [1.0, 1e-6, 0.0])
def test_near_ties_and_excluded_classes(n, T, spread):
    """With few finite scores, the bound is -inf. With many ties, most classes reach the bound."""
    generator = np.random.default_rng(n + T)
    for excluded in (0, 1, n // 4, n - T, n):
        for _ in range(10):
            row = 5000 + spread * generator.standard_normal(n)
            row[generator.permutation(n)[:excluded]] = -np.inf
            check(row, T)


@pytest.mark.parametrize("T", [1, 20, 60])
def test_scores_around_zero(T):
    """The two zeros are equal, and denormal numbers differ."""
    generator, tiny = np.random.default_rng(0), np.finfo(np.float32).tiny
    for values in (
        [0.0, -0.0],
        [0.0, -1.0],
        [tiny / 4, tiny / 2, -tiny / 4],
        [tiny, -tiny, 0.0],
        [-1.0, -2.0, -np.inf],
    ):
        check(generator.choice(np.array(values), 300), T)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_places_from(dtype):
    generator = np.random.default_rng(0)
    for n in (0, 1, 63, 64, 65, 200, 1000):
        x = generator.integers(-3, 4, n).astype(dtype)
        x[generator.random(n) < 0.1], x[generator.random(n) < 0.1] = np.nan, -np.inf
        for least in (-np.inf, 0.0, 2.5, 5.0):
            expected = np.flatnonzero(x >= least)
            for size in (n, 3, 0):
                where = np.full(size, -1)
                count = places_from(x, dtype(least), where)
                assert np.array_equal(where[:count], expected[:size])
                assert (where[count:] == -1).all()
