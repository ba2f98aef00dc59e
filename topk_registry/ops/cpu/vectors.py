"""Passes over the scores of one row that become vector instructions."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np

from topk_registry.ops.cpu.blocks import BLOCK, largest_of, total_of
from topk_registry.ops.cpu.functions import exp, log
from topk_registry.ops.cpu.numbers import compiled


@compiled
def place_of_largest(x):
    """The first place of the largest number; 0 where that is NaN."""
    best, at = largest_of(x[:BLOCK]), 0
    for start in range(BLOCK, len(x), BLOCK):
        largest = largest_of(x[start : start + BLOCK])
        if largest > best:
            best, at = largest, start
    for i in range(at, min(at + BLOCK, len(x))):
        if x[i] == best:
            return i
    return 0


@compiled
def exponentials(x, a, scale, out):
    """out = exp(scale (x - a)), and their sum."""
    total = 0.0
    for start in range(0, len(x), BLOCK):
        row, written = x[start : start + BLOCK], out[start : start + BLOCK]
        for i in range(len(row)):
            written[i] = exp((row[i] - a) * scale)
        total += total_of(written)
    return total


@compiled
def scale_by(x, factor):
    for i in range(len(x)):
        x[i] *= factor


@compiled
def nothing(g):
    """NaN as the loss, and as every entry of the gradient."""
    g[:] = np.nan
    return np.nan


@compiled
def probabilities_of(log_odds):
    """log p, log(1 - p), p and 1 - p of log-odds, none of them by a difference that cancels."""
    e = exp(-abs(log_odds))
    rest = log(1.0 + e) if e > 1e-9 else e
    above = log_odds > 0
    large, small = 1.0 / (1.0 + e), e / (1.0 + e)
    log_large, log_small = -rest, -abs(log_odds) - rest
    if above:
        return log_large, log_small, large, small
    return log_small, log_large, small, large
