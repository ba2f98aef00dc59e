"""Select the largest scores of a row of scores."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import NO_CLASS, ZERO, borrowing, compiled, copy, number_at, place_of, tiny

HALVINGS = 20  # bisection steps; in float32, the rest of the interval is below 1/2000 of the number
RANKED = np.int64(256)  # up to this many candidates are ranked by counting
LAST = np.iinfo(np.int64).max


@borrowing
def lines_of_search(n, T):
    """Return the number of maxima that :func:`largest` uses for T of n scores: about sqrt(n T), or 0 for small n."""
    lines = 32
    while lines < 2 * (T + 1) or (lines * lines < n * T and 4 * lines <= n):
        lines *= 2
    return lines if 2 * lines <= n else 0


@compiled
def scratch(n, T, dtype):
    """Return scratch memory for :func:`largest`: arrays for maxima, candidate classes and candidate scores."""
    return empty(lines_of_search(n, T), dtype), empty(n, np.int64), empty(n + 64, dtype)


@borrowing
def largest(row, skip, top, where, space):
    """Fill ``top`` with the largest scores of a row in descending order, and ``where`` with the classes of the scores.

    The class ``skip`` is left out. Return False if the row has fewer than len(top) other scores that are not NaN.
    """
    _, classes, scores = space
    candidates = _candidates(row, skip, len(top), RANKED, space)
    if candidates < len(top):
        return False
    in_order(scores, classes, candidates, top, where)
    return True


@borrowing
def _candidates(row, skip, T, short, space):
    """Write the T largest scores except class ``skip``, and possibly more, to ``space``. Return how many are written.

    The scores are written in class order, with their classes. A first pass over the row finds a bound that at least T
    scores reach. A second pass collects all scores that reach the bound. If ``space`` has no memory for maxima and the
    row has at most ``short`` scores, all scores are collected.
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
    for j in range(reached):  # without a branch, because the branch would be hard to predict
        i = classes[j]
        classes[candidates], scores[candidates] = i, row[i]
        candidates += (row[i] >= least) & (i != skip)
    return candidates


@borrowing
def in_order(scores, classes, candidates, top, where):
    """Write the largest of the first ``candidates`` scores to ``top`` in descending order. Ties keep their order."""
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
    """Return a number that at least T + 1 scores reach, so that at least T scores remain if one class is left out.

    The row is divided into len(maxima) parts, and at least T + 1 of the maxima of parts reach this number. To save
    time, parts are first merged until fewer than 4 (T + 1) parts remain.
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
    """Write to ``maxima[j]`` the maximum of ``row[j::len(maxima)]``, for a row at least as long as ``maxima``."""
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
    """Return a number that at least ``count`` scores reach, but few more; -inf if fewer scores exceed -inf."""
    # bisect the floats between the smallest score above -inf and the largest score
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
    """Return the next number below v. If v is 0 or a denormal number, return the largest negative normal number."""
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
