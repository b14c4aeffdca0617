"""numba where it is installed; without it the kernels still import, and `simulate.curves` replays budget by budget."""

from __future__ import annotations

try:
    from numba import njit, types
    from numba.extending import intrinsic

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

    def njit(**_):
        return lambda function: function


if AVAILABLE:

    @intrinsic
    def popcount(typing_context, word):  # one machine instruction
        def generate(context, builder, signature, arguments):
            return builder.ctpop(arguments[0])

        return types.uint64(types.uint64), generate
