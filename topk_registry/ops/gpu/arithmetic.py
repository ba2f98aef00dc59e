# type: ignore
"""Exponentials, logarithms and reciprocals that are one instruction, and others that keep their digits."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp2(x):
    """2^x, with 0 in the place of denormal numbers: to make those takes four more instructions."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def log2(x):
    """log2 of positive normal numbers."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def reciprocal(x):
    """1 / x of normal numbers, within a bit."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
