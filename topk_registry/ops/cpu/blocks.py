"""Functions on rows of scores in padded memory: copies, sums and maxima."""

import numpy as np

from topk_registry.ops.cpu.numbers import borrowing, copy, number_at, place_of, summing

BLOCK = 512  # total_of() sums blocks of this length in the precision of the array, and adds these sums in float64
CACHE_BLOCK = 1024  # a kernel applies several passes to this many scores at a time, while these are in the cache
PAD = 64  # rows are padded to a multiple of this, so that vector loops have no remainder


@borrowing
def padded(n):
    """Return the length of a padded row of n scores: the smallest multiple of ``PAD`` that is at least n."""
    return (n + PAD - 1) // PAD * PAD


@borrowing
def pad(row, x):
    """Copy a row to the beginning of ``x``, and fill the rest of ``x`` with -inf."""
    for i in range(len(row)):
        x[i] = row[i]
    for i in range(len(row), len(x)):
        x[i] = -np.inf


@borrowing
def fill(row, number):
    for i in range(len(row)):
        row[i] = number


@borrowing
def largest_of(x):
    """Return the largest number, or -inf for an empty array.

    Numbers are compared by their bits. Therefore, NaN with a plus sign is above inf, and NaN with a minus sign is below
    -inf. To find every NaN, use :func:`has_nan`.
    """
    best = place_of(x.dtype.type(-np.inf))
    for i in range(len(x)):
        best = max(best, place_of(x[i]))
    return number_at(best)


@borrowing
def largest_size(x):
    """Return the largest absolute value. If a number is NaN, return NaN. If the array is empty, return 0."""
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
    """Return the sum of the numbers, computed in the dtype of the array and in any order."""
    sum = w.dtype.type(0)
    for i in range(len(w)):
        sum += w[i]
    return sum


@borrowing
def total_of(x):
    """Return the sum as a float64. Blocks of numbers are summed in the dtype of ``x``, and their sums in float64."""
    sum_of_blocks = 0.0
    for start in range(0, len(x), BLOCK):
        sum_of_blocks += np.float64(total(x[start : start + BLOCK]))
    return sum_of_blocks


@borrowing
def out_of_range(labels, n):
    """Return whether a label is not in [0, n)."""
    for label in labels:  # noqa: SIM110  # a generator would be another function to compile
        if not 0 <= label < n:
            return True
    return False


@borrowing
def write_masses(r, labels, shares, even, dense, mass):
    """Write the masses of row r of a target, and return whether a class has mass.

    If ``dense`` [B, n] has rows, it holds the masses. Otherwise, every class has the mass ``even[r]``, or 0 if ``even``
    is empty, and the classes ``labels[r]`` have the masses ``shares[r]`` in addition.
    """
    if len(dense) > 0:
        copy(dense[r], mass)
    else:
        rest = even[r] if len(even) > 0 else 0.0
        fill(mass, np.float32(rest))
        for f in range(labels.shape[1]):
            mass[labels[r, f]] += np.float32(shares[r, f])
        return rest != 0 or largest_size(shares[r]) != 0
    return largest_size(mass) != 0
