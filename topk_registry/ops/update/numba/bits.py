"""Random bits by number: of each column of a row, for one update of a rank's rows. See ../README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from topk_registry.ops.cpu.masks import repeated
from topk_registry.ops.cpu.numbers import compiled
from topk_registry.ops.cpu.philox import AT_ONCE, LOW, VECTOR, WIDE, WORD, every, words_of


@intrinsic
def _words(typing_context, start, row, update, rank, key_0, key_1, low, high):
    """Write the words of AT_ONCE calls from ``start`` on: two each for a column, and two for one half a row further."""

    def codegen(context, builder, signature, arguments):
        start, *same = arguments[:4]
        lanes = ir.Constant(VECTOR, list(range(AT_ONCE)))
        counters = [builder.add(repeated(builder, start, AT_ONCE), lanes)]
        counters += [repeated(builder, one, AT_ONCE) for one in same]
        keys = [builder.trunc(one, WORD) for one in arguments[4:6]]
        vectors = words_of(builder, counters, keys)
        for number, vector in enumerate(vectors):
            made = context.make_array(signature.args[6 + number % 2])(context, builder, arguments[6 + number % 2])
            half = builder.udiv(made.nitems, WIDE(2)) if number > 1 else WIDE(0)
            place = builder.gep(made.data, [builder.add(start, half)])
            words = builder.trunc(builder.and_(vector, every(LOW)), ir.VectorType(WORD, AT_ONCE))
            builder.store(words, builder.bitcast(place, words.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, low, high), codegen


@compiled
def places(d):
    """Numbers of memory for a word of each column."""
    return (d + 2 * AT_ONCE - 1) // (2 * AT_ONCE) * (2 * AT_ONCE)


@compiled
def bits_of_row(row, update, rank, key_0, key_1, low, high) -> Any:
    """Two words of 32 bits for each column of a row, int32, in arrays as long as ``places``."""
    for start in range(0, len(low) // 2, AT_ONCE):
        _words(start, row, update, rank, key_0, key_1, low, high)
