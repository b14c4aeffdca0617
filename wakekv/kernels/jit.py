"""numba where it is installed; without it the kernels still import, and `simulate.curves` replays budget by budget."""

from __future__ import annotations

try:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

    def njit(**_):
        return lambda function: function

    def intrinsic(function):
        return function


@intrinsic
def popcount(typing_context, word):
    """uint64 -> uint64: how many bits are set, in one machine instruction."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """uint64 -> uint64: index of the lowest set bit; the word must not be 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def add_pair(typing_context, table, row, weight):
    """table[row] += 1, weight: float64 [row, 2], contiguous; both by one vector addition."""

    def generate(context, builder, signature, arguments):
        pair = ir.VectorType(ir.DoubleType(), 2)
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(builder.bitcast(start, pair.as_pointer()), [arguments[1]])
        double = builder.fpext(arguments[2], ir.DoubleType())
        change = builder.insert_element(ir.Constant(pair, [1.0, 0.0]), double, ir.Constant(ir.IntType(32), 1))
        builder.store(builder.fadd(builder.load(place, align=8), change), place, align=8)
        return context.get_dummy_value()

    return types.void(table, types.uint64, types.float32), generate
