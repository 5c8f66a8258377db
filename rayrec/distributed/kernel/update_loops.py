"""The compiled update of the rows that a batch looked up. Import it through `numba_loops.loops`.

A table's ids are sorted, so that equal rows come together: their gradients are added up in the order of the bags, and
the row is updated once, from memory that was asked for a few ids before. Suffixes: T tables, L lookups, N ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import intrinsic, overload

from rayrec._runtime.numba_loops import compiled

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM = 0, 1, 2, 3, 4  # Adam's kinds are the last
_ONE, _ZERO, _HALF, _LOW = nb.uint64(1), nb.uint64(0), nb.uint64(32), nb.uint64(2**32 - 1)
_LINE = nb.uint64(16)  # floats of a cache line
_AHEAD = nb.uint64(24)  # ids between asking for a row and its update
_MANY = 4096  # ids that are worth a digit of 11 bits
_TYPES = dict.fromkeys(("offsets", "first_lookup_T", "bits_T", "dim_T"), "int64[::1]")
_TYPES |= dict.fromkeys(("ids", "col_L", "first_weight_T", "first_state_T", "first_second_T"), "uint64[::1]")
_TYPES |= dict.fromkeys(("given_N", "grad", "state", "second", "betas"), "float32[::1]")
_TYPES |= dict.fromkeys(("num_bags", "width", "rule", "start", "stop"), "int64")
_TYPES |= {"rate": "float32", "eps": "float32"}
WEIGHTS = {"float32": "float32[::1]", "float16": "uint16[::1]", "bfloat16": "int16[::1]"}  # how loops see tables


@intrinsic
def _prefetch(typing: Any, array: Any, place: Any) -> Any:  # pragma: no cover (runs in the compiler)
    """Asks for the memory of an element, to write it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        target = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        builder.call(function, [target, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return nb.types.void(array, place), generate


_FLOAT, _HALF_FLOAT, _WORD, _SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)


def _in_llvm(source: Any, target: Any, build: Callable[[Any, Any], Any]) -> Any:
    """A function from a number of one type to one of another, built of LLVM's instructions."""

    @intrinsic
    def convert(typing: Any, number: Any) -> Any:  # pragma: no cover (runs in the compiler)
        return target(source), lambda context, builder, signature, args: build(builder, args[0])

    return convert


def _rounded(builder: Any, number: Any) -> Any:  # pragma: no cover (runs in the compiler)
    """The nearest bfloat16, of two equally near ones the even one."""
    bits, by = builder.bitcast(number, _WORD), _WORD(16)
    even = builder.and_(builder.lshr(bits, by), _WORD(1))
    near = builder.add(bits, builder.add(even, _WORD(0x7FFF)))
    no_number = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.lshr(builder.select(no_number, bits, near), by), _SHORT)


def _widened(builder: Any, bits: Any) -> Any:  # pragma: no cover (runs in the compiler)
    return builder.bitcast(builder.shl(builder.zext(bits, _WORD), _WORD(16)), _FLOAT)


_to_bfloat, _of_bfloat = _in_llvm(nb.float32, nb.int16, _rounded), _in_llvm(nb.int16, nb.float32, _widened)
_to_half = _in_llvm(nb.float32, nb.uint16, lambda at, number: at.bitcast(at.fptrunc(number, _HALF_FLOAT), _SHORT))
_of_half = _in_llvm(nb.uint16, nb.float32, lambda at, bits: at.fpext(at.bitcast(bits, _HALF_FLOAT), _FLOAT))


def _moved(weight: Any, place: Any, step: Any) -> None:
    """Adds to a weight of any of the three types."""


@overload(_moved, inline="always")
def _moved_in(weight: Any, place: Any, step: Any) -> Any:  # pragma: no cover (runs in the compiler)
    def of_float(weight: Any, place: Any, step: Any) -> None:
        weight[place] += step

    def of_half(weight: Any, place: Any, step: Any) -> None:
        weight[place] = _to_half(_of_half(weight[place]) + step)

    def of_bfloat(weight: Any, place: Any, step: Any) -> None:
        weight[place] = _to_bfloat(_of_bfloat(weight[place]) + step)

    return {nb.float32: of_float, nb.uint16: of_half, nb.int16: of_bfloat}[weight.dtype]


@nb.njit
def _sorted(key_N: Any, other_N: Any, size: Any, bits: Any, digit: Any) -> Any:
    """The keys by their upper halves, of `bits` bits, equal ones in their order; in one of both arrays."""
    count_D = np.empty(nb.int64(1) << digit, np.uint64)
    mask, done = (_ONE << nb.uint64(digit)) - _ONE, nb.int64(0)
    while done < bits:
        shift = _HALF + nb.uint64(done)
        count_D[:] = _ZERO
        for number in range(size):
            count_D[(key_N[number] >> shift) & mask] += _ONE
        total = _ZERO
        for value in range(count_D.size):
            count = count_D[value]
            count_D[value] = total
            total += count
        for number in range(size):
            value = (key_N[number] >> shift) & mask
            other_N[count_D[value]] = key_N[number]
            count_D[value] += _ONE
        key_N, other_N = other_N, key_N
        done += digit
    return key_N


@cache
def train_for(dtype: str) -> Any:
    """`_train`, compiled for tables of a number format."""
    types = _TYPES | {"weight": WEIGHTS[dtype]}
    return compiled(types, fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")(_train)


def _train(
    ids: Any,
    offsets: Any,
    given_N: Any,
    grad: Any,
    width: Any,
    num_bags: Any,
    first_lookup_T: Any,
    col_L: Any,
    bits_T: Any,
    dim_T: Any,
    weight: Any,
    first_weight_T: Any,
    state: Any,
    first_state_T: Any,
    second: Any,
    first_second_T: Any,
    rule: Any,
    rate: Any,
    eps: Any,
    betas: Any,
    start: Any,
    stop: Any,
) -> Any:
    """Trains tables `start` to `stop`, of which each has lookups side by side.

    Args:
        given_N: weights of the ids, or nothing.
        grad: of the bags `[B, width]`, flat; fewer than 2³² numbers.
        col_L: the first column of each lookup.
        bits_T: of a row number.
        second: Adam's second moments; nothing for other rules.
        rule: one of those above.
        betas: Adam's two decay rates, 1 less each, and 1 less each to the power of the updates so far.
    """
    most = nb.int64(0)
    for table in range(start, stop):
        first, last = first_lookup_T[table] * num_bags, first_lookup_T[table + 1] * num_bags
        most = max(most, offsets[last] - offsets[first])
    weighted = given_N.size > 0
    key_N, other_N = np.empty(most, np.uint64), np.empty(most, np.uint64)
    place_N = np.empty(most if weighted else 0, np.uint32)
    buffer = np.empty(max(dim_T) + 16, np.float32)
    sum_D = buffer[(64 - buffer.ctypes.data % 64) // 4 :]  # from the start of a cache line: half the time
    for table in range(start, stop):
        begin = nb.uint64(offsets[first_lookup_T[table] * num_bags])
        size, dim = _ZERO, dim_T[table]
        stride = nb.uint64(dim)
        for lookup in range(first_lookup_T[table], first_lookup_T[table + 1]):
            for bag in range(num_bags):
                place = nb.uint64(bag) * nb.uint64(width) + col_L[lookup]
                length = offsets[lookup * num_bags + bag + 1] - offsets[lookup * num_bags + bag]
                for _ in range(length):
                    if weighted:
                        place_N[size] = place
                        key_N[size] = (ids[begin + size] << _HALF) | size
                    else:
                        key_N[size] = (ids[begin + size] << _HALF) | place
                    size += _ONE
        row_N = _sorted(key_N, other_N, size, bits_T[table], 11 if size >= _MANY else 8)
        weights, states, seconds = first_weight_T[table], first_state_T[table], first_second_T[table]
        number = _ZERO
        while number < size:
            row = row_N[number] >> _HALF
            for col in range(dim):
                sum_D[col] = nb.float32(0)
            while number < size and row_N[number] >> _HALF == row:
                if number + _AHEAD < size:
                    later = row_N[number + _AHEAD]
                    line, ahead = _ZERO, (later >> _HALF) * stride
                    while line < stride:
                        _prefetch(weight, weights + ahead + line)  # type: ignore[call-arg]
                        if rule >= ADAM:
                            _prefetch(state, states + ahead + line)
                        if rule == ADAM:
                            _prefetch(second, seconds + ahead + line)
                        line += _LINE
                    if rule == ROWWISE_ADAGRAD:
                        _prefetch(state, states + (later >> _HALF))  # type: ignore[call-arg]
                    if rule == PARTIAL_ROWWISE_ADAM:
                        _prefetch(second, seconds + (later >> _HALF))  # type: ignore[call-arg]
                    line = stride if weighted else _ZERO
                    while line < stride:
                        _prefetch(grad, (later & _LOW) + line)  # type: ignore[call-arg]
                        line += _LINE
                place = row_N[number] & _LOW
                if weighted:
                    factor = given_N[begin + place]
                    place = nb.uint64(place_N[place])
                    for col in range(dim):
                        sum_D[col] += factor * grad[place + nb.uint64(col)]
                else:
                    for col in range(dim):
                        sum_D[col] += grad[place + nb.uint64(col)]
                number += _ONE
            first, factor = weights + row * stride, rate
            if rule == ADAGRAD:
                place = states + row * stride
                for col in range(dim):
                    total = state[place + nb.uint64(col)] + sum_D[col] * sum_D[col]
                    state[place + nb.uint64(col)] = total
                    _moved(weight, first + nb.uint64(col), -rate * sum_D[col] / (np.sqrt(total) + eps))
            elif rule >= ADAM:
                place, other, root = states + row * stride, seconds + row, nb.float32(0)
                if rule == PARTIAL_ROWWISE_ADAM:
                    square = nb.float32(0)
                    for col in range(dim):
                        square += sum_D[col] * sum_D[col]
                    second[other] = betas[1] * second[other] + betas[3] * square / nb.float32(dim)
                    root = np.sqrt(second[other] / betas[5])
                else:
                    other = seconds + row * stride
                for col in range(dim):
                    moment = betas[0] * state[place + nb.uint64(col)] + betas[2] * sum_D[col]
                    state[place + nb.uint64(col)] = moment
                    if rule == ADAM:
                        total = betas[1] * second[other + nb.uint64(col)] + betas[3] * sum_D[col] * sum_D[col]
                        second[other + nb.uint64(col)] = total
                        root = np.sqrt(total / betas[5])
                    _moved(weight, first + nb.uint64(col), -rate * (moment / betas[4]) / (root + eps))
            else:
                if rule == ROWWISE_ADAGRAD:
                    square = nb.float32(0)
                    for col in range(dim):
                        square += sum_D[col] * sum_D[col]
                    total = state[states + row] + square / nb.float32(dim)
                    state[states + row] = total
                    factor = rate / (np.sqrt(total) + eps)
                for col in range(dim):
                    _moved(weight, first + nb.uint64(col), -factor * sum_D[col])
    return -1
