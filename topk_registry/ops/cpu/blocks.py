"""Rows of scores in padded memory: load, store, sums and maxima."""

import numpy as np

from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import borrowing, compiled, number_at, place_of, summing

BLOCK = 512  # block size of sums in the precision of the numbers; block sums are added in double precision
CACHE_BLOCK = 1024  # number of scores per pass
PAD = 64  # rows are padded to a multiple of this, so that vector loops have no remainder


@borrowing
def padded(n):
    """Return the smallest multiple of PAD that is at least n."""
    return (n + PAD - 1) // PAD * PAD


@borrowing
def pad(row, x):
    """Copy a row to padded memory and fill the padding with -inf."""
    for i in range(len(row)):
        x[i] = row[i]
    for i in range(len(row), len(x)):
        x[i] = -np.inf


@borrowing
def fill(row, number):
    for i in range(len(row)):
        row[i] = number


@compiled
def ones(count, kind):
    made = empty(count, kind)
    fill(made, made.dtype.type(1))
    return made


@borrowing
def largest_of(x):
    """Return the largest number, or -inf for an empty array. A NaN with a positive sign gives NaN."""
    best = place_of(x.dtype.type(-np.inf))
    for i in range(len(x)):
        best = max(best, place_of(x[i]))
    return number_at(best)


@borrowing
def largest_size(x):
    """Return the largest absolute value, or NaN if a number is NaN."""
    best = place_of(x.dtype.type(0))
    for i in range(len(x)):
        best = max(best, place_of(abs(x[i])))
    return number_at(best)


@summing
def has_nan(x):
    nans = np.float32(0)
    for i in range(len(x)):
        nans += np.float32(x[i] != x[i])
    return nans > 0


@summing
def total(w):
    """Sum numbers in the precision of the array, in any order."""
    sum = w.dtype.type(0)
    for i in range(len(w)):
        sum += w[i]
    return sum


@borrowing
def total_of(x):
    """Sum many numbers in double precision."""
    sum_of_blocks = 0.0
    for start in range(0, len(x), BLOCK):
        sum_of_blocks += np.float64(total(x[start : start + BLOCK]))
    return sum_of_blocks
