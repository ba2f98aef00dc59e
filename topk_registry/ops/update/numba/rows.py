"""The step of one row at a time: states made wide, the formulas, random bits, rounding. See ../README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# numba's intrinsics are called without their first parameter

import math

import numpy as np
import torch
from numba import njit

from topk_registry.ops.cpu.blocks import largest_size, load
from topk_registry.ops.cpu.functions import entry
from topk_registry.ops.cpu.jobs import spans
from topk_registry.ops.cpu.memory import address_of, array, empty
from topk_registry.ops.cpu.numbers import bits_32, compiled, copy, number_32
from topk_registry.ops.cpu.storage import widen
from topk_registry.ops.update.definition import BLOCK, LOW, ONE, least
from topk_registry.ops.update.numba.bits import bits_of_row, places

BFLOAT16, CODES = 1, 2  # how a state is stored; 0 is float32
MASK, LEVEL = np.int32((1 << LOW) - 1), np.int32(ONE >> LOW)
LEAST_SIGNED, LEAST_POSITIVE = np.float32(least(127)), np.float32(least(255))
SPAN_SIGNED, SPAN_POSITIVE = np.float32(1 - least(127)), np.float32(1 - least(255))
NORMAL, ZERO = np.float32(np.finfo(np.float32).tiny), np.float32(0)

exact = njit(error_model="numpy")  # as the definition rounds: products are not fused with sums


@entry(dtypes=(torch.float32, torch.bfloat16))
def steps_of_rows(precision):
    """The step of all rows, see backend.py: settings and random stream, numbers of the rule, addresses."""
    stored, half = precision.stored, precision.half

    def body(job):
        integers, reals, address = array(job, 13, np.int64), array(job, 22, np.float64), array(job, 28, np.int64)
        m, d, at_once, first = integers[1], integers[2], integers[3], integers[8]
        is_adam, nesterov, count, kind = integers[4] != 0, integers[5] != 0, integers[6], integers[7]
        stream, numbers, memory = integers[9:13], reals[13:22], address[24:28]
        w, g = array(address[22], (m, d), stored), array(address[23], (m, d), np.float32)
        held = places(d)
        space = empty(5 * held, np.float32)
        at = address_of(space)
        x, p, q = array(at, d, np.float32), array(at + 4 * held, d, np.float32), array(at + 8 * held, d, np.float32)
        low, high = array(at + 12 * held, held, np.int32), array(at + 16 * held, held, np.int32)
        for start, stop in spans(job, at_once, m):
            for r in range(start, stop):
                bits_of_row(first + r, stream[0], stream[1], stream[2], stream[3], low, high)
                load(w[r], True, x)
                if count > 0:
                    read(kind, memory[0], memory[1], r, True, p)
                if count > 1:
                    read(kind, memory[2], memory[3], r, False, q)
                if is_adam:
                    adam(x, g[r], p, q, numbers)
                else:
                    sgd(x, g[r], p, count > 0, nesterov, numbers)
                if count > 0:
                    write(kind, memory[0], memory[1], r, True, p, low)
                if count > 1:
                    write(kind, memory[2], memory[3], r, False, q, high)
                if half:
                    for i in range(d):  # the bits that codes leave
                        low[i] = ((low[i] >> LOW) & np.int32(0xFFF)) | ((high[i] >> np.int32(8)) & np.int32(0xF000))
                    to_bfloat16(x, low, w[r])
                else:
                    copy(x, w[r])

    return body


@compiled
def sgd(x, g, p, has_momentum, nesterov, numbers):
    """w -= size u, see README.md."""
    size, decay = np.float32(numbers[0]), np.float32(numbers[2])
    first, rest = np.float32(numbers[3]), np.float32(numbers[4])
    for i in range(len(x)):
        h = g[i] + decay * x[i] if decay != ZERO else g[i]
        u = h
        if has_momentum:
            p[i] = rest * p[i] + first * h
            u = h + rest * p[i] if nesterov else p[i]
        x[i] -= size * u


@compiled
def adam(x, g, p, q, numbers):
    """w <- keep w - size m / (sqrt(v) / root + eps), see README.md."""
    size, keep = np.float32(numbers[0]), np.float32(numbers[1])
    decay, first = np.float32(numbers[2]), np.float32(numbers[3])
    rest, second, second_rest = np.float32(numbers[4]), np.float32(numbers[5]), np.float32(numbers[6])
    root, eps = np.float32(numbers[7]), np.float32(numbers[8])
    for i in range(len(x)):
        h = g[i] + decay * x[i] if decay != ZERO else g[i]
        # as torch's lerp: from the nearer end
        p[i] = p[i] + first * (h - p[i]) if first < np.float32(0.5) else h - (h - p[i]) * rest
        q[i] = second_rest * q[i] + second * h * h
        x[i] = keep * x[i] - size * p[i] / (math.sqrt(q[i]) / root + eps)


@compiled
def codes_of_row(values, scales, r, d):
    """A row's codes, its scales, and how many columns share one."""
    blocks = (d + BLOCK - 1) // BLOCK
    width = (d + blocks - 1) // blocks
    return array(values + r * d, d, np.uint8), array(scales + 4 * r * blocks, blocks, np.float32), width


@compiled
def read(kind, values, scales, r, signed, out):
    """Read a row of a state as float32."""
    d = len(out)
    if kind == CODES:
        codes, scale, width = codes_of_row(values, scales, r, d)
        for b in range(len(scale)):
            from_codes(codes[b * width : (b + 1) * width], scale[b], signed, out[b * width : (b + 1) * width])
    elif kind == BFLOAT16:
        widen(array(values + 2 * r * d, d, np.uint16), True, out)
    else:
        copy(array(values + 4 * r * d, d, np.float32), out)


@compiled
def write(kind, values, scales, r, signed, x, bits):
    """A row of a state, rounded to what it is kept in."""
    d = len(x)
    if kind == CODES:
        codes, scale, width = codes_of_row(values, scales, r, d)
        for b in range(len(scale)):
            part = slice(b * width, (b + 1) * width)
            scale[b] = to_codes(x[part], bits[part], signed, codes[part])
    elif kind == BFLOAT16:
        to_bfloat16(x, bits, array(values + 2 * r * d, d, np.uint16))
    else:
        copy(x, array(values + 4 * r * d, d, np.float32))


@exact
def to_bfloat16(x, bits, out):
    """Round at random by 16 bits a number."""
    for i in range(len(out)):
        out[i] = np.uint16((bits_32(x[i]) + (bits[i] & np.int32(0xFFFF))) >> np.int32(16))


@exact
def to_codes(x, bits, signed, codes):
    """Round at random by 20 bits a number; returns the scale, the largest magnitude."""
    scale = largest_size(x)
    divisor = NORMAL if scale < NORMAL else scale
    if signed:
        for i in range(len(x)):
            y = (abs(x[i]) / divisor) * SPAN_SIGNED + LEAST_SIGNED
            code = ((bits_32(y) + (bits[i] & MASK)) >> np.int32(LOW)) - (LEVEL - np.int32(127))
            codes[i] = np.uint8(code | ((bits_32(x[i]) >> np.int32(24)) & np.int32(0x80)))
    else:
        for i in range(len(x)):
            y = (x[i] / divisor) * SPAN_POSITIVE + LEAST_POSITIVE
            code = ((bits_32(y) + (bits[i] & MASK)) >> np.int32(LOW)) - (LEVEL - np.int32(255))
            codes[i] = np.uint8(max(code, np.int32(1)))
    return scale


@exact
def from_codes(codes, scale, signed, out):
    """The numbers that codes stand for."""
    if signed:
        for i in range(len(out)):
            code = np.int32(codes[i])
            y = number_32(((code & np.int32(127)) + (LEVEL - np.int32(127))) << np.int32(LOW))
            y = (y - LEAST_SIGNED) / SPAN_SIGNED * scale
            out[i] = number_32(bits_32(y) | ((code & np.int32(0x80)) << np.int32(24)))
    else:
        for i in range(len(out)):
            y = number_32((np.int32(codes[i]) + (LEVEL - np.int32(255))) << np.int32(LOW))
            out[i] = (y - LEAST_POSITIVE) / SPAN_POSITIVE * scale
