"""One row of ALDR-KL, see README.md: a pass over the row for each temperature tried, and one for the gradient."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np

from topk_registry.ops.cpu.blocks import BLOCK, largest_of, total_of
from topk_registry.ops.cpu.functions import power_of_2
from topk_registry.ops.cpu.numbers import LOG2E, compiled, copy, eps, summing
from topk_registry.ops.cpu.vectors import nothing
from topk_registry.ops.robust.definition import ROUNDING
from topk_registry.ops.rows.numba.row import kernel_of_row, of_label

TEMPERATURE, ALPHA, GAP = range(3)  # the kernel's numbers
PAD = 64  # rows are padded to a multiple of this
TRIALS = 40  # an end to the search for the temperature


@kernel_of_row(numbers=3)
def row(s, m, y, mass, b, number, at, room, g):
    if m is None or y >= 0:
        return at_label(s, y, mass, number[TEMPERATURE], number[ALPHA], number[GAP], g, room)
    return at_masses(s, m, mass, number[TEMPERATURE], number[ALPHA], number[GAP], g, room)


row_of_label = of_label(row)


@compiled
def padded(n, room):
    """Memory for scores and for their exponentials, with places beyond the n-th where there is room for them: loops of
    vector instructions then have no scores left over."""
    size = (n + PAD - 1) // PAD * PAD
    size = size if 2 * size <= len(room) else n
    return room[:size], room[size : 2 * size]


@compiled
def at_label(s, y, mass, temperature, alpha, gap, g, room):
    """The label's term is taken by itself, in double precision."""
    n, real, own, total = len(s), s.dtype.type, np.float64(s[y]) - gap, total_of(s)
    x, e = padded(n, room)
    copy(s, x[:n])
    x[n:], x[y] = -np.inf, -np.inf
    a = max(largest_of(x), real(own))
    if not abs(a) < np.inf or total != total:
        return nothing(g)
    own -= np.float64(a)
    lam, log_z = solve(x, own, a, math.log(n), temperature, alpha, e)
    share = real(mass * math.exp(-log_z))
    for i in range(n):
        g[i] = share * e[i]
    g[y] = mass * math.expm1(own / lam - log_z)
    return mass * (penalised(lam, log_z, len(s), temperature, alpha) - own)


@compiled
def at_masses(s, m, mass, temperature, alpha, gap, g, room):
    """The masses are those of a distribution times their sum."""
    if mass == 0:
        g[:] = 0
        return 0.0
    n, real, (x, e) = len(s), s.dtype.type, padded(len(s), room)
    lower(s, m, real(gap / mass), x)
    x[n:] = -np.inf
    a, total = largest_of(x), total_of(x[:n])
    if not abs(a) < np.inf or total != total:
        return nothing(g)
    lam, log_z = solve(x, -np.inf, a, math.log(n), temperature, alpha, e)
    ahead = 0.0
    share = real(mass * math.exp(-log_z))
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        ahead += np.float64(less_masses(e[start:stop], share, s[start:stop], a, m[start:stop], g[start:stop]))
    return mass * (penalised(lam, log_z, len(s), temperature, alpha) + gap) - ahead


@compiled
def lower(s, m, gap, x):
    for i in range(len(s)):
        x[i] = s[i] - gap * m[i]


@summing
def less_masses(e, share, s, a, m, g):
    """g <- share e - m; the sum of m (s - a)."""
    total = s.dtype.type(0)
    for i in range(len(s)):
        total += m[i] * (s[i] - a) if m[i] != 0 else s.dtype.type(0)
        g[i] = e[i] * share - m[i]
    return total


@compiled
def penalised(lam, log_z, n, temperature, alpha):
    """Equation 1 of the sum of exponentials."""
    log_n = math.log(n)
    return lam * (log_z - log_n) - alpha * log_n / (2 * temperature) * (lam - temperature) ** 2


@compiled
def solve(x, own, a, log_n, temperature, alpha, e):
    """The temperature, and the logarithm of the sum of e^((x - a) / temperature), which e is left with. ``own`` is one
    more of x - a."""
    stiffness, least = alpha * log_n / temperature, temperature * (1 - 1 / alpha)
    unit, low, certain = eps(x.dtype), -np.inf, False
    lam, trial, safe, step, steepness, log_z = temperature, temperature, temperature, 0.0, 1.0, 0.0
    for _ in range(TRIALS):
        lam = trial
        divergence, slope, concave, log_z = divergence_of(x, own, a, lam, log_n, e)
        excess = temperature - lam - divergence / stiffness
        if certain or lam == temperature or not excess > ROUNDING * unit * temperature:
            safe, step, steepness = lam, excess, 1 + slope / stiffness
            certain = certain or (concave and step <= 0)
            low = -np.inf if certain else low
            if not abs(step) > 4 * unit * temperature:
                break
        else:
            low = lam  # beyond a solution: the largest is between this and the last safe one
        newton = safe + step / (steepness if steepness > 0 else 1.0)
        trial = max(newton, least) if steepness > 0 and newton > low else (safe + max(low, least)) / 2
        if trial in (safe, low):
            break
    return lam, log_z


@compiled
def divergence_of(x, own, a, lam, log_n, e):
    """KL(p || uniform), its slope in lambda, whether it is concave there, and the logarithm of the sum of e."""
    inverse, u = x.dtype.type(LOG2E / lam), max(own / lam, -700.0)
    z = math.exp(u) if own > -np.inf else 0.0
    first, second, third = z * u, z * u * u, z * u * u * u
    for start in range(0, len(x), BLOCK):
        sums = moments(x[start : start + BLOCK], a, inverse, e[start : start + BLOCK])
        z, first = z + np.float64(sums[0]), first + np.float64(sums[1]) / LOG2E
        second, third = second + np.float64(sums[2]) / LOG2E**2, third + np.float64(sums[3]) / LOG2E**3
    log_z, mean = math.log(z), first / z
    variance = max(second / z - mean * mean, 0.0)
    concave = 3 * variance + third / z - mean * (3 * second / z - 2 * mean * mean) <= 0
    return mean - log_z + log_n, -variance / lam, concave, log_z


@summing
def moments(x, a, inverse, e):
    """e <- 2^u, u = (x - a) log2(e) / lambda; the sums of e times 1, u, u^2 and u^3."""
    real = x.dtype.type
    floor, z, first, second, third = real(-126 if x.itemsize == 4 else -1022), real(0), real(0), real(0), real(0)
    for i in range(len(x)):
        u = (x[i] - a) * inverse
        u = floor if u < floor else u
        v = real(0) if u == floor else power_of_2(u)
        e[i] = v
        z += v
        v *= u
        first += v
        v *= u
        second += v
        third += v * u
    return z, first, second, third
