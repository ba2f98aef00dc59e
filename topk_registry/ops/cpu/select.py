"""Select the largest scores of a row."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import NO_CLASS, ZERO, borrowing, compiled, copy, number_at, place_of, tiny

HALVINGS = 20  # bisection steps; the remaining interval is about 1/500 of a number's size if scores span 2^31 numbers
RANKED = np.int64(256)  # up to this many candidates are ranked by counting
LAST = np.iinfo(np.int64).max


@borrowing
def lines_of_search(n, T):
    """Return the stride of the search for maxima in :func:`largest`, about sqrt(n T); 0 for short rows."""
    lines = 32
    while lines < 2 * (T + 1) or (lines * lines < n * T and 4 * lines <= n):
        lines *= 2
    return lines if 2 * lines <= n else 0


@compiled
def scratch(n, T, dtype):
    """Return scratch memory for :func:`largest`, in which all classes may be candidates."""
    return empty(lines_of_search(n, T), dtype), empty(n, np.int64), empty(n + 64, dtype)


@borrowing
def largest(row, skip, top, where, space):
    """Write the T largest scores in descending order and their classes, without class ``skip``. False if too few."""
    _, classes, scores = space
    candidates = _candidates(row, skip, len(top), RANKED, space)
    if candidates < len(top):
        return False
    in_order(scores, classes, candidates, top, where)
    return True


@borrowing
def _candidates(row, skip, T, short, space):
    """Write the T largest scores, and possibly more, in class order, with their classes. Return how many are written.

    Vector instructions read most scores twice. The first pass takes the maximum of every len(maxima)-th score, and so
    gets a bound that at least T scores reach. The second pass collects the scores that reach the bound. A row without
    maxima gets a bound only if it has more than ``short`` scores.
    """
    maxima, classes, scores = space
    n, candidates, least = len(row), ZERO, row.dtype.type(-np.inf)
    if len(maxima) > 0:
        least = _lower_bound(row, maxima, scores, T)
    elif n > short:
        least = reached_by(row, T if skip == NO_CLASS else T + 1)
    if least > -np.inf:
        reached = places_above(row, _less_than(least, row), classes)
    else:
        reached = n
        for i in range(n):
            classes[i] = i
    for j in range(reached):  # without a branch, because branch prediction would fail
        i = classes[j]
        classes[candidates], scores[candidates] = i, row[i]
        candidates += (row[i] >= least) & (i != skip)
    return candidates


@borrowing
def in_order(scores, classes, candidates, top, where):
    """Write the largest of the first ``candidates`` scores in descending order, with classes. Ties keep their order."""
    T = len(top)
    for j in range(candidates):
        v, place = scores[j], min(j, T)
        if place == T and v <= top[T - 1]:
            continue
        while place > 0 and v > top[place - 1]:
            place -= 1
            if place + 1 < T:
                top[place + 1], where[place + 1] = top[place], where[place]
        if place < T:
            top[place], where[place] = v, classes[j]


@borrowing
def _lower_bound(row, maxima, folded, T):
    """Return a number that at least T + 1 scores reach. So at least T scores reach it without the class to skip.

    The number comes from the maxima of lines. Lines are first merged to fewer than 4 (T + 1), which costs little
    accuracy.
    """
    maxima_of_lines(row, maxima)
    lines = few = len(maxima)
    while few // 2 >= 2 * (T + 1):
        few //= 2
    folded = folded[:few]
    copy(maxima, folded)
    for start in range(few, lines, few):
        for j in range(few):
            folded[j] = max(folded[j], maxima[start + j]) + row.dtype.type(0)  # see maxima_of_lines
    return reached_by(folded, T + 1)


@borrowing
def maxima_of_lines(row, maxima):
    """Write the maximum of every len(maxima)-th score per start. The row must be at least as long as ``maxima``."""
    # "+ 0" changes only -0, and prevents masked stores of LLVM, which are slow on AMD processors
    n, lines, zero = len(row), len(maxima), row.dtype.type(0)
    copy(row, maxima)
    for start in range(lines, n - lines + 1, lines):
        stripe = row[start : start + lines]
        for j in range(lines):
            maxima[j] = (stripe[j] if stripe[j] > maxima[j] else maxima[j]) + zero
    rest = row[n - n % lines :]
    for j in range(len(rest)):
        maxima[j] = (rest[j] if rest[j] > maxima[j] else maxima[j]) + zero


@borrowing
def reached_by(x, count):
    """Return a number that at least ``count`` of the scores reach, and few more scores.

    The search bisects the interval of floats in sorted order until few scores remain. The search begins above -inf,
    because -inf is far from all other floats.
    """
    lowest = np.int64(place_of(x.dtype.type(-np.inf)))
    low, high, numbers = np.int64(LAST), lowest, 0
    for v in x:
        place = np.int64(place_of(v))
        high = max(high, place)
        low = min(low, place if place > lowest else np.int64(LAST))
        numbers += place > lowest
    if numbers < count:
        return x.dtype.type(-np.inf)
    for _ in range(HALVINGS):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = number_from(x, _number_at(middle, x))
        low, high = (middle, high) if reached >= count else (low, middle)
        if reached == count:
            break
    return _number_at(low, x)


@borrowing
def _less_than(v, x):
    """Return a number slightly below v, and below 0 if v is 0 or denormal."""
    least = tiny(x.dtype)
    return -least if abs(v) < least else _number_at(np.int64(place_of(v)) - 1, x)


@borrowing
def _number_at(place, x):
    return x.dtype.type(number_at(np.int32(place)) if x.itemsize == 4 else number_at(np.int64(place)))


@borrowing
def number_from(scores, v):
    """Return how many scores are at least v."""
    count = np.int32(0)
    for i in range(len(scores)):
        count += np.int32(scores[i] >= v)
    return count
