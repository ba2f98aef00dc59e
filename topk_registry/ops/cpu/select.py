"""Selection of the largest scores of a row."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.masks import above, number_of_bits, places_above
from topk_registry.ops.cpu.numbers import ZERO, compiled, copy, number_at, place_of

HALVINGS = 20  # leave about 1 in 500 of a number, with 2^31 numbers between the lowest and the highest score
LAST = np.iinfo(np.int64).max


@compiled
def lines_of_search(n, T):
    """Stride of the search for maxima in :func:`largest`, about sqrt(n T); 0 scans directly, as a short row does."""
    lines = 32
    while lines < 2 * (T + 1) or (lines * lines < n * T and 4 * lines <= n):
        lines *= 2
    return lines if 2 * lines <= n else 0


@compiled
def room(n, T, dtype):
    """Scratch memory of :func:`largest`: all classes may be candidates."""
    return np.empty(lines_of_search(n, T), dtype), np.empty(n, np.int64), np.empty(n + 64, dtype)


@compiled
def largest(row, skip, top, where, space):
    """The T largest scores, largest first, and their classes, the class ``skip`` left out; False if there are fewer.

    Most scores are looked at twice, by vector instructions: for the maxima over every len(maxima)-th score, which give
    a bound that T others reach, and for those that reach it.
    """
    maxima, found, scores = space
    n, T, candidates = len(row), len(top), ZERO
    least = _lower_bound(row, maxima, scores, T) if len(maxima) > 0 else top.dtype.type(-np.inf)
    if least > -np.inf:
        reached = places_above(row, _less_than(least, row), found)
    else:
        reached = n
        for i in range(n):
            found[i] = i
    for j in range(reached):  # without a branch: which are kept cannot be foretold
        i = found[j]
        found[candidates], scores[candidates] = i, row[i]
        candidates += (row[i] >= least) & (i != skip)
    if candidates < T:
        return False
    in_order(scores, found, candidates, top, where)
    return True


@compiled
def in_order(scores, found, candidates, top, where):
    """The largest scores, largest first, and their numbers in ``found``. There are ``candidates`` of them, at least as
    many as are asked for; the scores have room for 64 more."""
    if candidates <= 256:
        _place(scores, found, candidates, top, where)
    else:
        _sort_largest(scores, found, candidates, top, where)


@compiled
def _place(scores, found, candidates, top, where):
    """Each score where the number of larger ones says, equal ones after each other."""
    T = len(top)
    where[:] = -1
    padded = scores[: (candidates + 63) // 64 * 64]
    padded[candidates:] = -np.inf
    for j in range(candidates):
        place = number_larger(padded, padded[j])
        while place < T and where[place] >= 0:
            place += 1
        if place < T:
            top[place], where[place] = padded[j], found[j]


@compiled
def _sort_largest(scores, found, candidates, top, where):
    """As :func:`_place`, of many candidates: by a heap of T of them, whose lowest gives way to larger ones."""
    T = len(top)
    for j in range(T):
        top[j], where[j] = scores[j], found[j]
    for j in range(T // 2 - 1, -1, -1):
        _sink(top, where, j, T)
    for j in range(T, candidates):
        if scores[j] > top[0]:
            top[0], where[0] = scores[j], found[j]
            _sink(top, where, ZERO, T)
    for last in range(T - 1, 0, -1):
        top[0], top[last] = top[last], top[0]
        where[0], where[last] = where[last], where[0]
        _sink(top, where, ZERO, last)


@compiled
def _sink(top, where, j, size):
    """Move an entry of a heap with its lowest score in front down to its place."""
    v, i, child = top[j], where[j], 2 * j + 1
    while child < size:
        if child + 1 < size and top[child + 1] < top[child]:
            child += 1
        if top[child] >= v:
            break
        top[j], where[j] = top[child], where[child]
        j, child = child, 2 * child + 1
    top[j], where[j] = v, i


@compiled
def number_larger(scores, v):
    """How many are larger, of a multiple of 64 scores."""
    count = 0
    for start in range(0, len(scores), 64):
        count += number_of_bits(above(scores, start, v))
    return count


@compiled
def _lower_bound(row, maxima, folded, T):
    """A score that T + 1 others reach, so T whichever is left out: the one after the T largest of the lines' maxima, of
    which several are taken together first: twice as many as that tell nearly as much as all."""
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


@compiled
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


@compiled
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
        reached = _number_from(x, _number_at(middle, x))
        low, high = (middle, high) if reached >= count else (low, middle)
        if reached == count:
            break
    return _number_at(low, x)


@compiled
def _less_than(v, x):
    """A number just below v, and below zero where v is zero or might be taken for it, being denormal."""
    tiny = x.dtype.type(np.finfo(x.dtype).tiny)
    return -tiny if abs(v) < tiny else _number_at(np.int64(place_of(v)) - 1, x)


@compiled
def _number_at(place, x):
    return x.dtype.type(number_at(np.int32(place)) if x.itemsize == 4 else number_at(np.int64(place)))


@compiled
def _number_from(scores, v):
    count = np.int32(0)
    for i in range(len(scores)):
        count += np.int32(scores[i] >= v)
    return count
