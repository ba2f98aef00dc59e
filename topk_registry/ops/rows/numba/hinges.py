"""Hinges of one row on a threshold: of its label, or of every class."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.blocks import BLOCK
from topk_registry.ops.cpu.numbers import compiled, summing


@compiled
def hinge(s, y, mass, threshold, own, alpha, factor, scale, g):
    """scale (alpha + factor (threshold - s_y))_+ of the label: its gradient is in g, the threshold's is returned."""
    gap = np.float64(own[y]) if len(own) else alpha
    violation = gap + factor * (threshold - np.float64(s[y]))
    if violation >= 0:
        g[y] -= s.dtype.type(mass * scale * factor)
        return mass * scale * violation, mass * scale * factor
    return (violation if violation != violation else 0.0), 0.0


@compiled
def hinges(s, m, threshold, own, alpha, factor, scale, g):
    """As :func:`hinge`, of every class; g is written."""
    value, slope, real = 0.0, 0.0, s.dtype.type
    near = real(threshold)
    rest = factor * (threshold - np.float64(near)) if threshold - threshold == 0 else 0.0
    for start in range(0, len(s), BLOCK):
        stop = start + BLOCK
        gap = own[start:stop] if len(own) else own
        args = near, gap, real(alpha + rest), real(rest), real(factor), real(-scale * factor)
        costs, masses = _hinges(s[start:stop], m[start:stop], *args, g[start:stop])
        value += np.float64(costs)
        slope += np.float64(masses)
    return scale * value, scale * factor * slope


@summing
def _hinges(s, m, threshold, own, alpha, rest, factor, down, g):
    """The sums of the masses times the violations, and of the masses, over the classes that violate their gap."""
    value, slope, zero = s.dtype.type(0), s.dtype.type(0), s.dtype.type(0)
    if len(own):
        for i in range(len(s)):
            violation = factor * (threshold - s[i]) + (own[i] + rest)
            mass = m[i] if violation >= zero else zero
            value += mass * violation if mass != zero else zero  # 0 times infinity is no cost
            slope += mass
            g[i] = down * mass
    else:
        for i in range(len(s)):
            violation = factor * (threshold - s[i]) + alpha
            mass = m[i] if violation >= zero else zero
            value += mass * violation if mass != zero else zero
            slope += mass
            g[i] = down * mass
    return value, slope
