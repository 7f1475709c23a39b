"""A cache hint for compiled loops that know early where they will look."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def prefetch(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Begin to load array[row, column] of a C-contiguous array; changes nothing but time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, arguments[0])
        indices = [
            context.cast(builder, arg, ty, types.intp)
            for arg, ty in zip(arguments[1:], signature.args[1:], strict=True)
        ]
        pointer = cgutils.get_item_pointer(context, builder, kind, view, indices, wraparound=False)
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        kind_of = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        hint = cgutils.get_or_insert_function(builder.module, kind_of, "llvm.prefetch.p0")
        builder.call(hint, [builder.bitcast(pointer, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, row, column), generate
