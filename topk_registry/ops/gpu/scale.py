# type: ignore
"""Multiply a gradient in place by a number that is in GPU memory."""

import torch
import triton
import triton.language as tl

from topk_registry.ops.gpu.layout import launch

BLOCK = 2048
PROGRAMS = 1024  # a few programs per multiprocessor of a large GPU


def scale(gradient: torch.Tensor, g: torch.Tensor) -> None:
    """Multiply a contiguous ``gradient`` in place by the number ``g`` []. If ``g`` is 1, the gradient is not read."""
    count = gradient.numel()
    if count:
        launch(multiply, (min(PROGRAMS, -(-count // BLOCK)),), gradient, g, count, BLOCK=BLOCK, num_warps=8)


@triton.jit
def multiply(gradient_ptr, g_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(g_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK  # in 64 bits, so that the loop cannot step over 2^31
        for start in range(first, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(gradient_ptr + at, mask=at < count).to(tl.float32)
            tl.store(gradient_ptr + at, (x * factor).to(gradient_ptr.dtype.element_ty), mask=at < count)
