"""Smooth functions of one number of each class, such as its odds, known at a few points.

A function is computed at the points in double precision, and every class takes its value from the polynomial through
them. Sums over classes go the other way: weights of the points stand for all classes. The formulas are in the README of
the k-subset operator, under "Points".
"""
# pyright: reportCallIssue=false, reportArgumentType=false

from collections import namedtuple

import numpy as np
from numpy.polynomial import chebyshev

from topk_registry.ops.cpu.blocks import CACHE_BLOCK
from topk_registry.ops.cpu.memory import empty, zeros
from topk_registry.ops.cpu.numbers import compiled, copy, eps, inlined, summing

# Points in single and in double precision: for a function that is smooth up to -1, on numbers up to 1, the error falls
# by 3 + sqrt(8) with each, to 7e-10 and 4e-19.
IN_SINGLE, IN_DOUBLE = 12, 24
LEAST = 1e-12  # of the largest number: the points lie apart
AT_ONCE = 6  # moments that one pass over the classes takes


def _tables(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The points z from -1 to 1; and what leads from values there to coefficients of Chebyshev polynomials, [value,
    term], from these to coefficients of powers of z, [term, power], and from moments to weights, [moment, point].
    """
    polynomials = _cosines(np.outer(2 * np.arange(count)[::-1] + 1, np.arange(count)), 2 * count)  # T_j at the points
    z, terms = polynomials[:, 1], polynomials * (2 / count)
    terms[:, 0] /= 2
    powers = np.zeros((count, count))
    for j in range(count):
        powers[j, : j + 1] = chebyshev.cheb2poly(np.eye(count)[j])[: j + 1]
    turns = count // AT_ONCE
    moments = z[:, None, None] ** np.arange(turns)[:, None] * polynomials[:, None, ::turns]
    return z.copy(), terms, powers, np.linalg.inv(moments.reshape(count, count))


def _cosines(steps: np.ndarray, half: int) -> np.ndarray:
    """cos(pi steps / half): of many steps as exact as of few."""
    steps = np.minimum(steps % (2 * half), -steps % (2 * half))
    far = 2 * steps > half
    return np.where(far, -1.0, 1.0) * np.cos(np.pi / half * np.where(far, half - steps, steps))


Z_IN_SINGLE, TERMS_IN_SINGLE, POWERS_IN_SINGLE, WEIGHTS_IN_SINGLE = _tables(IN_SINGLE)
Z_IN_DOUBLE, TERMS_IN_DOUBLE, POWERS_IN_DOUBLE, WEIGHTS_IN_DOUBLE = _tables(IN_DOUBLE)

# The points, their weights, moments, room for terms; and coefficients of up to two functions.
Points = namedtuple("Points", "v weights moments terms c")


@inlined
def count_of(x):
    """The number of points for an array's precision, known when it is compiled."""
    return IN_SINGLE if eps(x.dtype) > 1e-10 else IN_DOUBLE


@compiled
def memory(count, kind):
    """Memory for so many points, IN_SINGLE or IN_DOUBLE, with coefficients of this kind of numbers."""
    return Points(zeros(count), zeros(count), empty(count), empty(2 * count), empty(2 * count, kind))


@compiled
def place(largest, v):
    """v <- the points for numbers from 0 to ``largest``; return the scale of z = scale v - 1."""
    half = 0.5 * max(largest, LEAST)
    z = Z_IN_SINGLE if len(v) == IN_SINGLE else Z_IN_DOUBLE
    for m in range(len(v)):
        v[m] = half + half * z[m]
    return 1 / half


@compiled
def fit(values, terms, c):
    """c <- the coefficients, in powers of z, of the polynomial with these values at the points.

    The first of ``terms`` <- those of Chebyshev polynomials: the last ones tell how far it is from the function.
    """
    single, powers = len(c) == IN_SINGLE, terms[len(c) :]
    _combine(values, TERMS_IN_SINGLE if single else TERMS_IN_DOUBLE, terms[: len(c)])
    _combine(terms, POWERS_IN_SINGLE if single else POWERS_IN_DOUBLE, powers)
    copy(powers, c)


@compiled
def _combine(x, table, out):
    """out <- the rows of a table, weighted by x."""
    out[:] = 0
    for m in range(len(out)):
        for j in range(len(out)):
            out[j] += x[m] * table[m, j]


@compiled
def start(points):
    """Begin the moments of a row."""
    points.moments[:] = 0


@compiled
def add(w, f, scale, points):
    """Add classes with numbers w and weights f to the moments, z = scale w - 1; f changes."""
    moments = points.moments
    for turn in range(len(moments) // AT_ONCE):
        sums = _moments(w, f, w.dtype.type(scale), len(moments) == IN_DOUBLE)
        for j in range(AT_ONCE):
            moments[AT_ONCE * turn + j] += np.float64(sums[j])


@summing
def _moments(w, f, scale, again):
    """The sums of f T_j(u), u = T_2(z) or T_4(z), with Chebyshev polynomials T_j; f <- f z."""
    one, two, zero = w.dtype.type(1), w.dtype.type(2), w.dtype.type(0)
    zeroth = first = second = third = fourth = fifth = zero
    for i in range(len(w)):
        z, weight = scale * w[i] - one, f[i]
        square = two * z * z - one
        u = two * square * square - one if again else square
        step, one_term = two * u, u * weight
        two_terms = step * one_term - weight
        three = step * two_terms - one_term
        four = step * three - two_terms
        zeroth += weight
        first += one_term
        second += two_terms
        third += three
        fourth += four
        fifth += step * four - three
        f[i] = weight * z
    return zeroth, first, second, third, fourth, fifth


@compiled
def finish(points):
    """Turn the moments into the weights of the points."""
    _combine(
        points.moments,
        WEIGHTS_IN_SINGLE if len(points.moments) == IN_SINGLE else WEIGHTS_IN_DOUBLE,
        points.weights,
    )


@compiled
def weigh(w, mass, scale, points, scratch):
    """The weights of the points that stand for classes with numbers w and these masses, z = scale w - 1."""
    start(points)
    for begin in range(0, len(w), CACHE_BLOCK):
        part = w[begin : begin + CACHE_BLOCK]
        f = scratch[: len(part)]
        copy(mass[begin : begin + CACHE_BLOCK], f)
        add(part, f, scale, points)
    finish(points)


@compiled
def power_sums(w, most, count, points, P, scratch):
    """P[j - 1] <- the sum of w^j, j = 1..count, of numbers up to ``most``; 0 from there on."""
    v, weights = points.v, points.weights
    weigh(w, w, place(most, v), points, scratch)
    for j in range(count):
        total = 0.0
        for m in range(len(v)):
            total += weights[m]
            weights[m] *= v[m]
        P[j] = total
    for j in range(count, len(P)):
        P[j] = 0


@compiled
def add_products(x, w, scale, c, out):
    """out += x p(z), z = scale w - 1, with the coefficients of :func:`fit`."""
    one, last, scale = w.dtype.type(1), count_of(w) - 1, w.dtype.type(scale)
    for i in range(len(w)):
        z, total = scale * w[i] - one, c[last]
        for j in range(last - 1, -1, -1):
            total = total * z + c[j]
        out[i] += x[i] * total
