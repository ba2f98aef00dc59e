"""Rows of scores in padded memory: load, store, totals and maxima."""

import numpy as np

from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import borrowing, compiled, number_at, place_of, summing

BLOCK = 512  # numbers that are added up in their own precision; sums of blocks are added in double precision
CACHE_BLOCK = 1024  # scores to work on at a time
PAD = 64  # rows are padded to a multiple of this: no loop of vector instructions has scores left over


@borrowing
def padded(n):
    """The least multiple of PAD that holds n scores."""
    return (n + PAD - 1) // PAD * PAD


@borrowing
def pad(row, x):
    """Copy a row to padded memory; the scores beyond the row's end are -inf."""
    for i in range(len(row)):
        x[i] = row[i]
    for i in range(len(row), len(x)):
        x[i] = -np.inf


@borrowing
def fill(row, number):
    """The same number everywhere."""
    for i in range(len(row)):
        row[i] = number


@compiled
def ones(count, kind):
    """Return an array of ``count`` ones."""
    made = empty(count, kind)
    fill(made, made.dtype.type(1))
    return made


@borrowing
def largest_of(x):
    """Return the largest number, -inf of none. A NaN with a positive sign gives NaN."""
    best = place_of(x.dtype.type(-np.inf))
    for i in range(len(x)):
        best = max(best, place_of(x[i]))
    return number_at(best)


@borrowing
def largest_size(x):
    """The largest absolute value; NaN where there is one."""
    best = place_of(x.dtype.type(0))
    for i in range(len(x)):
        best = max(best, place_of(abs(x[i])))
    return number_at(best)


@summing
def total(w):
    """Sum numbers in their own precision, in any order."""
    sum = w.dtype.type(0)
    for i in range(len(w)):
        sum += w[i]
    return sum


@borrowing
def total_of(x):
    """The sum of many numbers, in double precision."""
    sum_of_blocks = 0.0
    for start in range(0, len(x), BLOCK):
        sum_of_blocks += np.float64(total(x[start : start + BLOCK]))
    return sum_of_blocks
