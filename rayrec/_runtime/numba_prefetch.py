"""Prefetches elements of arrays in compiled loops. Imported by modules with such loops; numba is slow to load."""

from __future__ import annotations

from typing import Any

import numba as nb
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic


def _prefetch(_: Any, array: Any, index: Any) -> Any:  # pragma: no cover (runs in the compiler)
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        elements = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, signature.args[0], elements, [arguments[1]])
        address = builder.bitcast(address, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
        builder.call(function, [address, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return nb.void(array, index), generate


prefetch: Any = intrinsic(_prefetch)
"""`prefetch(array, index)` starts to load an element that is written next, without waiting for it."""
