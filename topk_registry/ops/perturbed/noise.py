"""Noise as a function of indices: a counter-based generator, and the inverse of the normal distribution function."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from topk_registry.ops.cpu.masks import numbers_from, repeated
from topk_registry.ops.cpu.numbers import bits_64, compiled, inlined, number_64
from topk_registry.ops.cpu.philox import AT_ONCE, LOW, VECTOR, WIDE, WORD, every, words_of

CALLS_AT_ONCE = 512  # generator calls per block, a multiple of AT_ONCE
FIRST_BYTES, OTHER_BYTES = 0, 1  # purpose of a generator call

STEPS, DEGREE = 8, 5  # pieces of Q^-1 per octave, and degree of their polynomials, for an error of 1e-9
TABLE = 64 * STEPS + 1, DEGREE + 1  # shape of the table of Q^-1
MANTISSA = np.int64((1 << 52) // STEPS - 1)


def _philox(context, builder, signature, arguments):
    """Return the two 64-bit words of AT_ONCE calls as vectors, for call indices, a row, a purpose and two keys."""
    calls, start, row, use, key_0, key_1 = arguments[:6]

    c0 = numbers_from(context, builder, signature.args[0], calls, start, AT_ONCE)
    c1, c2 = builder.lshr(c0, every(32)), repeated(builder, row, AT_ONCE)
    c3 = repeated(builder, builder.add(builder.shl(builder.lshr(row, WIDE(32)), WIDE(1)), use), AT_ONCE)
    c0, c1, c2, c3 = words_of(builder, [c0, c1, c2, c3], [key_0, key_1])
    halves = (c0, c1), (c2, c3)
    return [builder.or_(builder.and_(low, every(LOW)), builder.shl(high, every(32))) for low, high in halves]


@intrinsic
def _words(typing_context, calls, start, row, use, key_0, key_1, words):
    """Write two 64-bit words for each of AT_ONCE calls from ``start`` on, to ``words`` from 2 * start on."""

    def codegen(context, builder, signature, arguments):
        drawn = _philox(context, builder, signature, arguments)
        order = [lane for i in range(AT_ONCE) for lane in (i, AT_ONCE + i)]
        both = builder.shuffle_vector(*drawn, ir.Constant(ir.VectorType(WORD, 2 * AT_ONCE), order))
        place = builder.add(arguments[1], arguments[1])
        _store(context, builder, both, signature.args[6], arguments[6], place)
        return context.get_dummy_value()

    return types.void(calls, *_CALL, words), codegen


@intrinsic
def _uniforms(typing_context, calls, start, row, use, key_0, key_1, first, u):
    """Write 2^64 U of AT_ONCE calls from ``start`` on, or 2^64 - 2^64 U if the first byte exceeds 127.

    U consists of this first byte and two 32-bit words of the generator.
    """

    def codegen(context, builder, signature, arguments):
        word, _ = _philox(context, builder, signature, arguments)
        rest = builder.or_(builder.shl(builder.and_(word, every(LOW)), every(24)), builder.lshr(word, every(40)))
        byte = numbers_from(context, builder, signature.args[6], arguments[6], arguments[1], AT_ONCE)
        byte = builder.zext(byte, VECTOR)
        m = builder.or_(builder.shl(builder.and_(byte, every(127)), every(56)), rest)
        m = builder.select(builder.icmp_unsigned(">", byte, every(127)), builder.xor(m, every((1 << 63) - 1)), m)
        real = ir.VectorType(ir.DoubleType(), AT_ONCE)
        uniforms = builder.fadd(builder.sitofp(m, real), ir.Constant(real, [0.5] * AT_ONCE))
        _store(context, builder, uniforms, signature.args[7], arguments[7], arguments[1])
        return context.get_dummy_value()

    return types.void(calls, *_CALL, first, u), codegen


_CALL = types.int64, types.int64, types.int64, types.uint32, types.uint32


def _store(context, builder, vector, array_type, array, start):
    data = context.make_array(array_type)(context, builder, array).data
    builder.store(vector, builder.bitcast(builder.gep(data, [start]), vector.type.as_pointer()), align=8)


@compiled
def philox_of(calls, row, use, key, words):
    """Write two 64-bit words per call, for a multiple of AT_ONCE calls."""
    for start in range(0, len(calls), AT_ONCE):
        _words(calls, start, row, use, key[0], key[1], words)


@compiled
def normals_of(place, first, row, key, table, z):
    """Compute normal numbers for these places, from first bytes and one generator call per place.

    The arrays have AT_ONCE - 1 additional places, which are computed too.
    """
    for start in range(0, len(place), AT_ONCE):
        _uniforms(place, start, row, OTHER_BYTES, key[0], key[1], first, z)
        normal_of(first[start : start + AT_ONCE], table, z[start : start + AT_ONCE])


@inlined
def normal_of(first, table, z):
    """Replace results of :func:`_uniforms` with Q^-1 of them, in place."""
    for i in range(AT_ONCE):
        bits = bits_64(z[i])
        c = table[np.uint64((bits >> 49) - (1022 << 3))]
        t = number_64(((bits & MANTISSA) << 3) | (1023 << 52)) - 1
        v = c[0]
        for j in range(1, DEGREE + 1):
            v = v * t + c[j]
        z[i] = -v if first[i] > 127 else v


@lru_cache(maxsize=1)
def table() -> Tensor:
    """Return Q^-1(2^-64 m) for m from 1/2 to 2^63 as polynomials in t, where m = 2^(e-1) (1 + (step + t) / STEPS)."""
    nodes = (1 - np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))) / 2
    octave, step = np.divmod(np.arange(64 * STEPS + 1), STEPS)
    u = (1 + (step[:, None] + nodes) / STEPS) * 2.0 ** (octave[:, None] - 65)
    z = -torch.special.ndtri(torch.from_numpy(u))
    return torch.linalg.solve(torch.from_numpy(np.vander(nodes)), z.T).T.contiguous()
