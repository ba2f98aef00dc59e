"""The Triton kernel: one program a row and draw, which makes its noise by Philox where it uses it."""
# the language of kernels is not Python's
# pyright: reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def kth_of_draw(scores_ptr, seed_ptr, value_ptr, index_ptr, n, rank, sign, epsilon, N: tl.constexpr):
    """The score of the given rank in sign * (scores + epsilon * noise), and its class; a value of NaN for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1)
    out = row * tl.num_programs(1) + draw
    counter = out * (N // 4) + tl.arange(0, N // 4)
    z0, z1, z2, z3 = tl.randn4x(tl.load(seed_ptr), counter)
    z = tl.reshape(tl.join(tl.join(z0, z1), tl.join(z2, z3)), (N,))  # in any order, as long as it is the same
    col = tl.arange(0, N)
    s = tl.load(scores_ptr + row * n + col, mask=col < n, other=0.0)
    broken = tl.max((s != s).to(tl.int32), 0) > 0
    # -inf stands for what is taken: classes of that score are kept above it
    x = tl.maximum(tl.where(s == s, sign * (s + epsilon * z), LOWEST), LOWEST)
    x = tl.where(col < n, x, float("-inf"))
    v, i = tl.max(x, 0, return_indices=True)
    for _ in range(1, rank):
        x = tl.where(col == i, float("-inf"), x)
        v, i = tl.max(x, 0, return_indices=True)
    v = sign * tl.where(v > LOWEST, v, float("-inf"))
    tl.store(value_ptr + out, tl.where(broken, float("nan"), v))
    tl.store(index_ptr + out, i.to(tl.int64))
