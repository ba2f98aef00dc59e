"""Curves as C functions: the losses of the classes of a row and their slopes, in loops of vector instructions."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from collections.abc import Callable

import numpy as np

from topk_registry.ops.cpu.functions import Entry, function_type, log_not_of, vectorised
from topk_registry.ops.cpu.memory import array
from topk_registry.ops.rows.curve import Compiled

# double curve(count, log p, log(1 - p), p, 1 - p, m, M, first, numbers, own, slope): of ``count`` classes from the
# class ``first`` on, of masses m in a row of mass M, the sum of m on + (M - m) off, and their slopes in log-odds.
# fmt: off
CURVE = function_type(
    "double", "int64", "pointer", "pointer", "pointer", "pointer", "pointer", "double", "int64", "pointer", "pointer",
    "pointer",
)
# fmt: on
call_curve = CURVE.call

# softmax(count, s, e, m, M, first, numbers, own, sizes, slope, sums): the same of softmax probabilities, with scores s,
# p = sizes[SHARE] e, and log p = sizes[FACTOR] (s - sizes[MOST]) - sizes[LOG_Z]. The class sizes[SKIPPED] of these is
# left out. slope is divided by 1 - p; the sums of losses and of slopes are added to sums.
# fmt: off
SOFTMAX = function_type(
    "double", "int64", "pointer", "pointer", "pointer", "double", "int64", "pointer", "pointer", "pointer", "pointer",
    "pointer",
)
# fmt: on
call_softmax = SOFTMAX.call
SHARE, FACTOR, MOST, LOG_Z, SKIPPED = range(5)
NUMBERS = 6  # that a curve has at most


def address_of(one: Compiled) -> int:
    """The address of a curve compiled here."""
    return of_curve(one)(one.dtype)


def of_curve(one: Compiled) -> Entry:
    """The entry of a curve for its one precision; its name is the curve's symbol."""
    make = _softmax_body if one.softmax else _body
    return Entry(
        lambda precision: make(vectorised(one.curve, precision.real), one.others, precision.real),
        SOFTMAX if one.softmax else CURVE,
        (one.dtype,),
        sums=True,
        name=one.symbol,
    )


def _body(curve: Callable, others: bool, real: type) -> Callable:
    def body(count, log_p, log_not, p, not_p, m, mass, first, numbers, own, slope):
        log_p, log_not = array(log_p, count, real), array(log_not, count, real)
        p, not_p, m = array(p, count, real), array(not_p, count, real), array(m, count, real)
        number, slope = array(numbers, NUMBERS + 1, np.float64), array(slope, count, real)
        each = np.int64(number[0])  # 1: there is a number for each class, 0: there is not
        own = array(own, (first + count) * each, real)[first * each :]
        x = (real(number[1]), real(number[2]), real(number[3]), real(number[4]), real(number[5]), real(number[6]))
        total, whole, zero = real(0), real(mass), real(0)
        for i in range(count):
            z = own[i] if each else zero
            if others:
                on, up, off, down = curve(log_p[i], log_not[i], p[i], not_p[i], z, x)
                rest = whole - m[i]
                total += (m[i] * on if m[i] != zero else zero) + rest * off
                slope[i] = m[i] * up + rest * down
            else:
                on, up = curve(log_p[i], log_not[i], p[i], not_p[i], z, x)
                total += m[i] * on if m[i] != zero else zero  # 0 times inf: a class of no mass costs nothing
                slope[i] = m[i] * up if m[i] != zero else zero
        return total

    return body


def _softmax_body(curve: Callable, others: bool, real: type) -> Callable:
    def softmax(count, s, e, m, mass, first, numbers, own, sizes, slope, sums):
        s, e, m = array(s, count, real), array(e, count, real), array(m, count, real)
        number, slope = array(numbers, NUMBERS + 1, np.float64), array(slope, count, real)
        size, sums = array(sizes, SKIPPED + 1, np.float64), array(sums, 2, np.float64)
        each, skipped = np.int64(number[0]), np.int64(size[SKIPPED])
        own = array(own, (first + count) * each, real)[first * each :]
        x = (real(number[1]), real(number[2]), real(number[3]), real(number[4]), real(number[5]), real(number[6]))
        share, factor, most, log_z = real(size[SHARE]), real(size[FACTOR]), real(size[MOST]), real(size[LOG_Z])
        total, slopes, whole, zero, one = real(0), real(0), real(mass), real(0), real(1)
        for i in range(count):
            z = own[i] if each else zero
            p = share * e[i]
            not_p = one - p
            log_p, log_not = (s[i] - most) * factor - log_z, log_not_of(p)
            if others:
                on, up, off, down = curve(log_p, log_not, p, not_p, z, x)
                rest = whole - m[i]
                value = (m[i] * on if m[i] != zero else zero) + rest * off
                h = m[i] * up + rest * down
            else:
                on, up = curve(log_p, log_not, p, not_p, z, x)
                value = m[i] * on if m[i] != zero else zero
                h = m[i] * up if m[i] != zero else zero
            h = h / not_p if i != skipped else zero
            total += value if i != skipped else zero
            slopes += h
            slope[i] = h
        sums[0] += total
        sums[1] += slopes
        return 0.0

    return softmax
