"""Half-precision numbers, which numba does not know: their 16 bits to and from single precision."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from topk_registry.ops.cpu.numbers import cast, compiled


@intrinsic
def _from_float16(typing_context, bits):
    def codegen(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


_number, _bits = cast(types.uint32, types.float32), cast(types.float32, types.uint32)


@compiled
def widen(half, is_bfloat16, wide):
    """Numbers in float16, or in bfloat16 where ``is_bfloat16`` says so, to float32."""
    if is_bfloat16:
        for i in range(len(half)):
            wide[i] = _number(np.uint32(half[i]) << np.uint32(16))
    else:
        for i in range(len(half)):
            wide[i] = _from_float16(half[i])


@compiled
def narrow(wide, half):
    """Numbers in float32 to the nearest in bfloat16, ties to even; NaN stays NaN."""
    for i in range(len(half)):
        bits = _bits(wide[i])
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = rounded if wide[i] == wide[i] else np.uint32(0x7FC00000)
        half[i] = np.uint16(rounded >> np.uint32(16))
