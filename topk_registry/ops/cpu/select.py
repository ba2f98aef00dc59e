"""Selection of the largest scores of a row."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.masks import places_above
from topk_registry.ops.cpu.memory import empty
from topk_registry.ops.cpu.numbers import NO_CLASS, ZERO, borrowing, compiled, copy, number_at, place_of, tiny

HALVINGS = 20  # leave about 1 in 500 of a number, with 2^31 numbers between the lowest and the highest score
RANKED = np.int64(256)  # up to so many candidates have their places counted
LAST = np.iinfo(np.int64).max


@borrowing
def lines_of_search(n, T):
    """Stride of the search for maxima in :func:`largest`, about sqrt(n T); 0 scans directly, as a short row does."""
    lines = 32
    while lines < 2 * (T + 1) or (lines * lines < n * T and 4 * lines <= n):
        lines *= 2
    return lines if 2 * lines <= n else 0


@compiled
def scratch(n, T, dtype):
    """Return scratch memory of :func:`largest`: all classes may be candidates."""
    return empty(lines_of_search(n, T), dtype), empty(n, np.int64), empty(n + 64, dtype)


@borrowing
def largest(row, skip, top, where, space):
    """The T largest scores, largest first, and their classes, the class ``skip`` left out; False if there are fewer."""
    _, classes, scores = space
    candidates = _candidates(row, skip, len(top), RANKED, space)
    if candidates < len(top):
        return False
    in_order(scores, classes, candidates, top, where)
    return True


@borrowing
def _candidates(row, skip, T, short, space):
    """Write the T largest scores and their classes, and perhaps some more, in the order of classes; return how many.

    Most scores are looked at twice, by vector instructions: for the maxima over every len(maxima)-th score, which give
    a bound that T others reach, and for those that reach it. A row without maxima has a bound beyond ``short`` scores.
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
    for j in range(reached):  # without a branch: which are kept cannot be foretold
        i = classes[j]
        classes[candidates], scores[candidates] = i, row[i]
        candidates += (row[i] >= least) & (i != skip)
    return candidates


@borrowing
def in_order(scores, classes, candidates, top, where):
    """Write the largest of the first ``candidates`` scores, largest first, and their classes; ties keep their order."""
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
    """Return a number that T + 1 scores reach, so T whichever one is left out, from the maxima of interleaved lines.

    Lines are merged first, to fewer than 4 (T + 1); that costs little accuracy.
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
    """The largest of every len(maxima)-th score, from each of the first on; a row is at least as long."""
    # "+ 0" changes no number but -0, and keeps LLVM from storing under a mask, which is slow on AMD's processors
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
    """Return a number that ``count`` of these reach, and few more.

    The interval of their places in the order of all numbers is halved until few are left in it. It begins above -inf,
    which is far from all others.
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
    """A number just below v, and below zero where v is zero or might be taken for it, being denormal."""
    least = tiny(x.dtype)
    return -least if abs(v) < least else _number_at(np.int64(place_of(v)) - 1, x)


@borrowing
def _number_at(place, x):
    return x.dtype.type(number_at(np.int32(place)) if x.itemsize == 4 else number_at(np.int64(place)))


@borrowing
def number_from(scores, v):
    """How many are v or larger."""
    count = np.int32(0)
    for i in range(len(scores)):
        count += np.int32(scores[i] >= v)
    return count
