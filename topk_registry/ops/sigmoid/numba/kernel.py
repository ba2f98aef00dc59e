"""One row of the sigmoid family, see README.md: every class on the curve, its score being its log-odds."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from topk_registry.ops.cpu.blocks import BLOCK
from topk_registry.ops.cpu.functions import exp, log1p
from topk_registry.ops.cpu.memory import address_of
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.rows.numba.curves import NUMBERS, call_curve
from topk_registry.ops.rows.numba.row import kernel_of_row

LOGARITHMS, PARAMETERS = range(2)  # the kernel's numbers; the curve's follow
CURVE_AT, OWN = range(2)  # addresses


@kernel_of_row(numbers=PARAMETERS + NUMBERS + 1, operands=2)
def row(s, m, y, mass, b, number, at, room, g):
    if y >= 0:
        m[:] = 0
        m[y] = mass
    parameters = address_of(number[PARAMETERS:])
    return rows(s, m, mass, at[CURVE_AT], number[LOGARITHMS] != 0, parameters, at[OWN], g, room)


@compiled
def rows(s, m, mass, curve, logarithms, parameters, own, g, room):
    n, one, value = len(s), s.dtype.type(1), 0.0
    size = min(BLOCK, n)
    log_p, log_not, p, not_p = room[:size], room[size : 2 * size], room[2 * size : 3 * size], room[3 * size :]
    log_p[:], log_not[:] = 0, 0
    for start in range(0, n, BLOCK):
        row = s[start : start + BLOCK]
        for i in range(len(row)):
            e = exp(-abs(row[i]))
            large = one / (one + e)
            small = e * large
            p[i] = large if row[i] > 0 else small
            not_p[i] = small if row[i] > 0 else large
            log_p[i] = e
        if logarithms:
            for i in range(len(row)):
                large = log1p(log_p[i])
                log_p[i] = min(row[i], one - one) - large
                log_not[i] = -max(row[i], one - one) - large
        at = (address_of(log_p), address_of(log_not), address_of(p), address_of(not_p), address_of(m[start:]))
        value += call_curve(curve, (len(row), *at, mass, start, parameters, own, address_of(g[start:])))
    return value
