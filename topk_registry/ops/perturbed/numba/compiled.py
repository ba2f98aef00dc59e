"""How the kernel is compiled, and instructions that Python has no word for."""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

compiled = njit(error_model="numpy", fastmath={"contract"})  # products may be fused with sums
inlined = njit(error_model="numpy", fastmath={"contract"}, forceinline=True)  # or loops around it are not vectors
summing = njit(error_model="numpy", fastmath={"contract", "reassoc"})  # and long sums be reordered


def _numbers(context, builder, array_type, array, start, count):
    """``count`` numbers of an array from ``start`` on, as one vector."""
    kind = context.get_value_type(array_type.dtype)
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.bitcast(builder.gep(data, [start]), ir.VectorType(kind, count).as_pointer())
    vector = builder.load(place)
    vector.align = array_type.dtype.bitwidth // 8
    return vector


@intrinsic
def within(typing_context, numbers, start, bounds, of_bounds):
    """64 bits: which of 64 bytes from ``start`` on are at most the bounds from ``of_bounds`` on."""

    def codegen(context, builder, signature, arguments):
        left = _numbers(context, builder, signature.args[0], arguments[0], arguments[1], 64)
        right = _numbers(context, builder, signature.args[2], arguments[2], arguments[3], 64)
        return builder.bitcast(builder.icmp_unsigned("<=", left, right), ir.IntType(64))

    return types.uint64(numbers, types.int64, bounds, types.int64), codegen


@intrinsic
def reaching(typing_context, numbers, start, bound):
    """16 bits: which of 16 numbers from ``start`` on are at least the bound."""

    def codegen(context, builder, signature, arguments):
        left = _numbers(context, builder, signature.args[0], arguments[0], arguments[1], 16)
        right = ir.Constant(left.type, ir.Undefined)
        for i in range(16):
            right = builder.insert_element(right, arguments[2], ir.Constant(ir.IntType(32), i))
        reached = builder.bitcast(builder.fcmp_ordered(">=", left, right), ir.IntType(16))
        return builder.zext(reached, ir.IntType(64))

    return types.uint64(numbers, types.int64, numbers.dtype), codegen


@intrinsic
def lowest_bit(typing_context, bits):
    """The place of the lowest bit that is 1."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), codegen


@intrinsic
def number_of_bits(typing_context, bits):
    """How many bits are 1."""

    def codegen(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), codegen
