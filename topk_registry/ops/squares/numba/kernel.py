"""One row of the losses of sums of squares, see README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu.blocks import BLOCK, total_of
from topk_registry.ops.cpu.functions import log
from topk_registry.ops.cpu.numbers import compiled, summing
from topk_registry.ops.rows.numba.row import kernel_of_row

BOUND, SHIFT, EPSILON = range(3)  # the kernel's numbers
XI_MIN, NEWTON_STEPS = 1e-4, 6


@kernel_of_row(numbers=3)
def row(s, m, y, mass, b, number, at, room, g):
    if number[BOUND] != 0:
        return bound(s, m, y, mass, g)
    return log_likelihood(s, m, y, mass, s.dtype.type(number[SHIFT]), number[EPSILON], g)


@compiled
def log_likelihood(s, m, y, mass, shift, epsilon, g):
    """Equations 1 and 2: x = s + shift is left in g, and scaled to the gradient."""
    real, n = s.dtype.type, len(s)
    for i in range(n):
        g[i] = s[i] + shift
    scale, squares = scaled_squares(g)
    weights = squares + n * (epsilon * scale) * scale  # of the scaled numbers
    log_weights, small = np.log(weights) - 2 * np.log(scale), epsilon
    # two factors: their product may be below the range of numbers where the scores are near its end
    first, factor = real(scale), real(2 * mass * (scale / weights))
    if y >= 0:
        x = np.float64(g[y])
        root = math.hypot(x, math.sqrt(small))
        for i in range(n):
            g[i] = (g[i] * first) * factor
        g[y] -= real(2 * mass * (x / root) / root)
        return mass * (log_weights - 2 * np.log(root))
    value, root = 0.0, real(math.sqrt(small))
    for start in range(0, n, BLOCK):
        value += likelihoods(g[start : start + BLOCK], m[start : start + BLOCK], root, first, factor)
    return mass * log_weights - value


@summing
def likelihoods(x, m, root, first, factor):
    """Return the sum of m log(x^2 + root^2), with the larger of x and root taken out of the square.

    x <- the gradient of the loss; the partition function's part of it is x first factor.
    """
    total, one, two = x.dtype.type(0), x.dtype.type(1), x.dtype.type(2)
    for i in range(len(x)):
        size = abs(x[i])
        large = size if size > root else root
        small = root if size > root else size
        ratio = small / large
        whole = one + ratio * ratio
        total += m[i] * (two * log(large) + log(whole))
        x[i] = (x[i] * first) * factor - two * m[i] * ((x[i] / large) / (large * whole))
    return total


@compiled
def scaled_squares(x):
    """A scale, 1 unless squares would leave the range of numbers, and the sum of squares of the scaled numbers."""
    total = squares_of(x, x.dtype.type(1))
    limit = 1e30 if x.itemsize == 4 else 1e290
    if total < limit and (total > 1 / limit or total == 0):
        return 1.0, total
    if total != total:
        return 1.0, total
    most = 0.0
    for i in range(len(x)):
        most = max(most, abs(np.float64(x[i])))
    if most == 0 or most == np.inf:
        return 1.0, np.inf if most else 0.0
    scale = 2.0 ** -math.floor(math.log2(most))
    return scale, squares_of(x, x.dtype.type(scale))


@compiled
def squares_of(x, scale):
    total = 0.0
    for start in range(0, len(x), BLOCK):
        total += np.float64(_squares(x[start : start + BLOCK], scale))
    return total


@summing
def _squares(x, scale):
    total = x.dtype.type(0)
    for i in range(len(x)):
        v = x[i] * scale
        total += v * v
    return total


@compiled
def bound(s, m, y, mass, g):
    """Equations 3 to 6: the centred scores are left in g, and turned into the gradient."""
    real, D = s.dtype.type, len(s)
    mean = total_of(s) / D
    centre = real(mean)
    for i in range(D):
        g[i] = s[i] - centre
    low = mean - np.float64(centre)  # what rounding the mean has left over, of importance to the squares only
    scale, squares = scaled_squares(g)
    squares -= D * (low * scale) * (low * scale)
    rms = math.sqrt(max(squares, 0.0) / D) / scale if squares == squares else squares
    xi = optimal_xi(rms, D)
    u = 2 / (math.exp(xi) + 1) if xi < 700 else 0.0
    t = 1 - u
    partition = xi / t * ((D - 1) / D - D / 4 * u * u) + D * math.log1p(math.exp(-xi) if xi < 700 else 0.0)
    partition += t / 4 * (rms / xi) * rms * D
    slope = mass * t / (2 * xi)
    if y >= 0:
        value = mass * (partition - (np.float64(g[y]) - low))
        spread = real(mass / D - slope * low)
        factor = real(slope)
        for i in range(D):
            g[i] = g[i] * factor + spread
        g[y] -= real(mass)
        return value
    value = 0.0
    spread, factor = real(mass / D - slope * low), real(slope)
    for start in range(0, D, BLOCK):
        value += np.float64(masses(g[start : start + BLOCK], m[start : start + BLOCK], factor, spread))
    return mass * (partition + low) - value


@summing
def masses(c, m, factor, spread):
    """c <- the gradient; the sum of m c."""
    total = c.dtype.type(0)
    for i in range(len(c)):
        total += m[i] * c[i] if m[i] != 0 else c.dtype.type(0)
        c[i] = c[i] * factor + (spread - m[i])
    return total


@compiled
def optimal_xi(rms, D):
    """The xi of the tightest bound, by Newton's method in its bracket; see the definition."""
    d = 2 / D
    c = math.sqrt(d * (2 - d))
    low = max(rms / c, math.log(D - 1), XI_MIN)
    high = max(1.5 * rms / c, math.log(D - 1) + 1)
    xi = (low + high) / 2
    if rms != rms or rms == np.inf:
        return np.nan
    if D == 2:  # W is 1
        return low
    for _ in range(NEWTON_STEPS):
        u = 2 / (math.exp(xi) + 1) if xi < 700 else 0.0
        t = 1 - u
        W = max((d - u) * (2 - d - u) / (t * t), 0.0)
        slope = 2 * (1 - d) ** 2 * u * (1 - u / 2) / t**3
        xi -= (xi * W - rms * (rms / xi)) / (2 * W + xi * slope)
        xi = min(max(xi, low), high)
    return xi
