"""Philox4x32-10: random words as a function of counters, computed for many counters at once as vectors.

Reference: Salmon, Moraes, Dror, Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011.
"""

from typing import Any

from llvmlite import ir

from topk_registry.ops.cpu.masks import repeated

AT_ONCE = 16  # number of counters per step
ROUNDS, MULTIPLY_0, MULTIPLY_1, WEYL_0, WEYL_1 = 10, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
LOW = (1 << 32) - 1
WORD, WIDE = ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(WIDE, AT_ONCE)


def words_of(builder: Any, counters: list[Any], keys: list[Any]) -> list[Any]:
    """Return the four words of AT_ONCE counters [4] with two 32-bit keys, with 32 bits per 64-bit lane.

    The upper 32 bits of each lane are ignored in the input and undefined in the result.
    """

    def product(factor: int, x: Any) -> Any:
        return builder.mul(builder.and_(x, every(LOW)), every(factor))

    def mixed(x: Any, y: Any, key: Any) -> Any:
        key = repeated(builder, builder.zext(key, WIDE), AT_ONCE)
        return builder.xor(builder.xor(builder.lshr(x, every(32)), y), key)

    (c0, c1, c2, c3), (key_0, key_1) = counters, keys
    for _ in range(ROUNDS):
        first, second = product(MULTIPLY_0, c0), product(MULTIPLY_1, c2)
        c0, c1, c2, c3 = mixed(second, c1, key_0), second, mixed(first, c3, key_1), first
        key_0, key_1 = builder.add(key_0, WORD(WEYL_0)), builder.add(key_1, WORD(WEYL_1))
    return [c0, c1, c2, c3]


def every(number: int) -> ir.Constant:
    return ir.Constant(VECTOR, [number] * AT_ONCE)
