# type: ignore
"""Add the losses of all rows up, in one program."""

import triton
import triton.language as tl


@triton.jit
def add_up(
    losses_ptr, label_ptr, weight_ptr, value_ptr, factor_ptr, B, n, ignore_index,
    COUNTS: tl.constexpr, WEIGHTED: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of losses. With ``COUNTS`` losses were divided by B: their mean, and the factor that makes it one, B over
    the sum of the labels' weights, which is 1 where every row counts as one."""
    total = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, B, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + row, mask=row < B, other=0.0).to(tl.float64)
        if COUNTS:
            label = tl.load(label_ptr + row, mask=row < B, other=0)
            counted = (row < B) & (label != ignore_index)
            own = counted.to(tl.float32)
            if WEIGHTED:
                own = tl.load(weight_ptr + label, mask=counted & (label >= 0) & (label < n), other=0.0).to(tl.float32)
            count += own.to(tl.float64)
    value = tl.sum(total, 0)
    if COUNTS:
        divisor = tl.sum(count, 0)
        value = value * (B / divisor)  # of nothing it is NaN, as cross-entropy's
        tl.store(factor_ptr, tl.where(divisor > 0, B / divisor, 0.0).to(tl.float32))
    if EMPTY:
        value = value + float("nan")
    tl.store(value_ptr, value.to(tl.float32))
