# type: ignore
"""Exponential, logarithm and reciprocal for Triton kernels. Each compiles to one instruction on GPUs of NVIDIA."""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)  # whether PTX can be inserted
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp2(x):
    """Return 2^x, or 0 if 2^x is a denormal number. Exact denormal results would take four more instructions."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def log2(x):
    """Return the logarithm to base 2 of positive normal numbers."""
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def reciprocal(x):
    """Return 1 / x for normal numbers, with an error of at most one unit in the last place."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        return 1.0 / x
