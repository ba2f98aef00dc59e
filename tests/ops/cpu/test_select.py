"""Selection of the largest scores of a row, against sorting all of them."""

import numpy as np
import pytest

from tests.ops.compiled import for_python
from topk_registry.ops.cpu import masks, select

largest, scratch = for_python(select.largest), for_python(select.scratch)
reached_by, places_above = for_python(select.reached_by), for_python(masks.places_above)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["rising", "falling", "random", "equal", "few values", "holes"])
@pytest.mark.parametrize(("n", "T"), [(65, 64), (100, 50), (257, 1), (300, 257), (300, 290), (3000, 400)])
def test_the_largest_of_more_candidates_than_are_ranked_one_by_one(n, T, order, dtype):
    generator = np.random.default_rng(0)
    row = {
        "rising": np.arange(n),
        "falling": -np.arange(n),
        "random": generator.standard_normal(n),
        "equal": np.zeros(n),
        "few values": generator.integers(0, 3, n),
        "holes": np.where(generator.random(n) < 0.01, -np.inf, generator.standard_normal(n)),
    }[order].astype(dtype)
    top, where = np.empty(T, dtype), np.empty(T, np.int64)
    assert largest(row, 5, top, where, scratch(n, T, row.dtype))
    others = np.delete(row, 5)
    np.testing.assert_array_equal(top, np.sort(others)[::-1][:T])
    np.testing.assert_array_equal(row[where], top)
    assert len(set(where)) == T
    assert 5 not in where


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "T"), [(64, 3), (256, 5), (256, 50), (1000, 11), (1000, 101)])
def test_the_largest_of_rows_with_classes_left_out_and_near_ties(n, T, dtype):
    """Few scores far apart, nearly all tied, or many left out: then most lines of the search are of interest, and most
    classes are candidates."""
    generator, space = np.random.default_rng(n + T), scratch(n, T, dtype)
    for left_out in (0, 1, n // 4, n - T):
        for spread in (1.0, 1e-6, 0.0):
            for _ in range(10):
                row = (5000 + spread * generator.standard_normal(n)).astype(dtype)
                row[generator.permutation(n)[:left_out]] = -np.inf
                top, where = np.empty(T, dtype), np.empty(T, np.int64)
                assert largest(row, -1, top, where, space)
                assert np.array_equal(top, np.sort(row)[::-1][:T])
                assert np.array_equal(row[where], top)
                assert len(set(where.tolist())) == T


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_bound_that_so_many_reach(dtype):
    generator = np.random.default_rng(0)
    for count in (1, 5, 40, 64):
        for x in (generator.standard_normal(64), 1e6 * generator.standard_normal(64), np.zeros(64), np.arange(64) // 8):
            x = x.astype(dtype)
            x[40:] = x[40:] if count > 40 else -np.inf
            bound, exact = reached_by(x, count), np.sort(x)[-count]
            assert (x >= bound).sum() >= count
            # as many, or those that are equal to the last of them or less by what the halvings leave
            assert (x >= bound).sum() == count or bound >= exact - 0.004 * abs(exact) - np.finfo(dtype).tiny


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_around_zero(dtype):
    """Bounds of either zero, of denormal numbers and of negative ones leave none out that reaches them."""
    generator, tiny = np.random.default_rng(0), np.finfo(dtype).tiny
    for values in (
        [0.0, -0.0],
        [0.0, -1.0],
        [tiny / 4, tiny / 2, -tiny / 4],
        [tiny, -tiny, 0.0],
        [-1.0, -2.0, -np.inf],
    ):
        row = generator.choice(np.array(values, dtype), 300)
        for T in (1, 20, 90):
            top, where = np.empty(T, dtype), np.empty(T, np.int64)
            assert largest(row, 7, top, where, scratch(300, T, dtype))
            assert np.array_equal(top, np.sort(np.delete(row, 7))[::-1][:T])
            assert np.array_equal(row[where], top)
            assert 7 not in where


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_places_above(dtype):
    generator = np.random.default_rng(0)
    for n in (0, 1, 63, 64, 65, 200, 1000):
        x = generator.integers(-3, 4, n).astype(dtype)
        x[generator.random(n) < 0.1], x[generator.random(n) < 0.1] = np.nan, -np.inf
        for least in (-np.inf, 0.0, 2.5, 5.0):
            expected = np.flatnonzero(x > least)
            for size in (n, 3, 0):
                where = np.full(size, -1)
                count = places_above(x, dtype(least), where)
                assert np.array_equal(where[:count], expected[:size])
                assert (where[count:] == -1).all()


def test_nans_are_not_among_the_largest():
    row = np.array([np.nan, 1.0, 3.0, np.nan, 2.0])
    for T, enough in ((3, True), (4, False)):
        top, where = np.empty(T), np.empty(T, np.int64)
        assert largest(row, -1, top, where, scratch(5, T, np.float64)) == enough
        assert not enough or set(where.tolist()) == {1, 2, 4}
