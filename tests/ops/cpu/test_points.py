"""Smooth functions of one number of each class by a few points, and sums over classes by weights of the points."""

import numpy as np
import pytest
from numba import njit

from tests.ops.compiled import for_python
from topk_registry.ops.cpu import points

place, fit, power_sums, add_products, weigh = map(
    for_python,
    (
        points.place, points.fit, points.power_sums, points.add_products, points.weigh,
    ),
)  # fmt: skip
take = {
    np.float32: njit(lambda: points.memory(points.IN_SINGLE, np.float32)),
    np.float64: njit(lambda: points.memory(points.IN_DOUBLE, np.float64)),
}
DTYPES = [np.float32, np.float64]
TRUNCATION = {np.float32: 1.4e-9, np.float64: 1e-18}  # what the points leave of 1 / (1 + v) on [0, 1]
ODDS = {
    "spread": np.exp(-np.linspace(0, 30, 3000)),
    "equal": np.full(70, 1.0),
    "one": np.array([1.0]),
    "none": np.zeros(64),
}


def memory_of(dtype: type) -> points.Points:
    return take[dtype]()


def error(dtype: type, terms: int) -> float:
    """The error of a sum of so many terms of up to 1, beside what the points leave."""
    return TRUNCATION[dtype] + terms * float(np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [1.0, 0.3, 1e-3, 1e-20])
def test_a_smooth_function_at_every_class(dtype, largest):
    memory = memory_of(dtype)
    scale, c = place(largest, memory.v), memory.c[: len(memory.v)]
    fit(1 / (1 + memory.v), memory.terms, c)
    v = np.linspace(0, largest, 500).astype(dtype)
    found = np.zeros_like(v)
    add_products(v, v, scale, c, found)
    exact = v.astype(np.float64) / (1 + v.astype(np.float64))
    assert (np.abs(found - exact) <= error(dtype, 4) * exact).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ODDS)
def test_sums_over_classes_by_weights_of_the_points(kind, dtype):
    w = ODDS[kind].astype(dtype)
    g = np.random.default_rng(0).standard_normal(len(w)).astype(dtype)
    memory = memory_of(dtype)
    weigh(w, g, place(float(w.max()), memory.v), memory, np.empty(1024, dtype))
    for function in (np.ones_like, lambda v: 1 / (1 + v), lambda v: np.exp(-v)):
        exact = (g.astype(np.float64) * function(w.astype(np.float64))).sum()
        size = np.abs(g.astype(np.float64)).sum()
        assert abs((memory.weights * function(memory.v)).sum() - exact) <= error(dtype, len(memory.v)) * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ODDS)
@pytest.mark.parametrize("largest", [1 / 3, 20.0])
def test_power_sums(kind, largest, dtype):
    """They are exact for as many powers as there are points."""
    w = (largest * ODDS[kind]).astype(dtype)
    memory = memory_of(dtype)
    count = len(memory.v)
    P = np.full(count + 3, np.nan)
    power_sums(w, float(w.max()), count, memory, P, np.empty(1024, dtype))
    assert (P[count:] == 0).all()
    for j in range(1, count + 1):
        size = w.astype(np.float64).sum() * float(w.max()) ** (j - 1)
        assert abs(P[j - 1] - (w.astype(np.float64) ** j).sum()) <= error(dtype, count) * size


@pytest.mark.parametrize("dtype", DTYPES)
def test_power_sums_make_the_polynomial_of_the_tail(dtype):
    """Powers beyond the number of points are not exact, but the series of the logarithm is, on the circle |X| = 1."""
    w = np.exp(-np.linspace(np.log(3), 12, 900)).astype(dtype)
    P, memory = np.zeros(60), memory_of(dtype)
    power_sums(w, float(w.max()), 60, memory, P, np.empty(1024, dtype))
    x, j = np.exp(1j * np.linspace(0, np.pi, 50)), np.arange(1, 61)
    series = -((-x[:, None]) ** j / j * P).sum(1)
    exact = np.log(1 + w.astype(np.float64) * x[:, None]).sum(1)
    assert np.abs(series - exact).max() <= error(dtype, len(memory.v)) * w.astype(np.float64).sum()


def test_the_number_of_points_is_that_of_the_precision():
    count = njit(lambda x: points.count_of(x))
    assert [count(np.zeros(1, dtype)) for dtype in DTYPES] == [points.IN_SINGLE, points.IN_DOUBLE]
