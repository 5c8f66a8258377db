"""The compiled update of the rows that a batch looked up. Import it through `numba_loops.loops`.

The loop sorts a table's ids, adds up the gradients of equal rows in the order of the bags, and updates each row once.
It prefetches rows some ids ahead. Suffixes: T tables, L lookups, N ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from rayrec._runtime.numba_loops import compiled
from rayrec._runtime.numba_prefetch import prefetch
from rayrec.distributed.kernel.sort_loops import sort

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM = 0, 1, 2, 3, 4  # both kinds of Adam are last
_ONE, _ZERO, _HALF, _LOW = nb.uint64(1), nb.uint64(0), nb.uint64(32), nb.uint64(2**32 - 1)
_LINE = nb.uint64(16)  # floats per cache line
_AHEAD = nb.uint64(24)  # ids between the prefetch of a row and its update
_MANY = 4096  # ids that justify a radix of 11 bits
_TYPES = dict.fromkeys(("offsets", "first_lookup_T", "bits_T", "dim_T"), "int64[::1]")
_TYPES |= dict.fromkeys(("ids", "col_L", "first_weight_T", "first_state_T", "first_second_T"), "uint64[::1]")
_TYPES |= dict.fromkeys(("weights_N", "grad", "state", "second", "betas"), "float32[::1]")
_TYPES |= dict.fromkeys(("num_bags", "width", "rule", "parts", "start", "stop"), "int64")
_TYPES |= {"rate": "float32", "eps": "float32"}
# Data types of tables in the loops.
WEIGHTS = {"float32": "float32[::1]", "float16": "uint16[::1]", "bfloat16": "int16[::1]"}


_FLOAT, _HALF_FLOAT, _WORD, _SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)


def _in_llvm(source: Any, target: Any, build: Callable[[Any, Any], Any]) -> Any:
    """A conversion from one number type to another, built from LLVM instructions."""

    @intrinsic
    def convert(typing: Any, number: Any) -> Any:  # pragma: no cover (runs in the compiler)
        return target(source), lambda context, builder, signature, args: build(builder, args[0])

    return convert


def _rounded(builder: Any, number: Any) -> Any:  # pragma: no cover (runs in the compiler)
    """The nearest bfloat16; ties round to even."""
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


def _moved(weight: Any, index: Any, step: Any) -> None:
    """Adds `step` to a weight of any of the three types."""


@overload(_moved, inline="always")
def _moved_in(weight: Any, index: Any, step: Any) -> Any:  # pragma: no cover (runs in the compiler)
    def of_float(weight: Any, index: Any, step: Any) -> None:
        weight[index] += step

    def of_half(weight: Any, index: Any, step: Any) -> None:
        weight[index] = _to_half(_of_half(weight[index]) + step)

    def of_bfloat(weight: Any, index: Any, step: Any) -> None:
        weight[index] = _to_bfloat(_of_bfloat(weight[index]) + step)

    return {nb.float32: of_float, nb.uint16: of_half, nb.int16: of_bfloat}[weight.dtype]


@cache
def train_for(dtype: str) -> Any:
    """`_train`, compiled for tables of a number format."""
    types = _TYPES | {"weight": WEIGHTS[dtype]}
    return compiled(types, fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")(_train)


def _train(
    ids: Any,
    offsets: Any,
    weights_N: Any,
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
    parts: Any,
    start: Any,
    stop: Any,
) -> Any:
    """Trains parts `start` to `stop` of the tables. The lookups of each table are consecutive.

    Each table has `parts` parts, in turn. Part p has the rows whose number modulo `parts` is p, so that parts of the
    most frequent rows are alike, and a row's gradients are added up in the same order with any number of parts.

    Args:
        weights_N: Weights of the ids, or empty.
        grad: Gradient of the bags `[B, width]`, flat, with fewer than 2³² numbers.
        col_L: First column of each lookup.
        bits_T: Number of bits of a row number.
        second: Adam's second moments, empty for other rules.
        rule: One of the rules above.
        betas: Adam's two decay rates b, then 1 - b, then 1 - b ** (number of updates).
        parts: A power of two.
    """
    max_ids = nb.int64(0)
    mask = nb.uint64(parts - 1)
    for table in range(start // parts, (stop + parts - 1) // parts):
        begin_bag, end_bag = first_lookup_T[table] * num_bags, first_lookup_T[table + 1] * num_bags
        max_ids = max(max_ids, offsets[end_bag] - offsets[begin_bag])
    weighted = weights_N.size > 0
    key_N, spare_N = np.empty(max_ids, np.uint64), np.empty(max_ids, np.uint64)
    position_N = np.empty(max_ids if weighted else 0, np.uint32)
    buffer = np.empty(max(dim_T) + 16, np.float32)
    sum_D = buffer[(64 - buffer.ctypes.data % 64) // 4 :]  # starts at a cache line, which halves the time
    for item in range(start, stop):
        table, part = item // parts, nb.uint64(item % parts)
        begin = nb.uint64(offsets[first_lookup_T[table] * num_bags])
        size, dim, taken = _ZERO, dim_T[table], _ZERO
        stride = nb.uint64(dim)
        for lookup in range(first_lookup_T[table], first_lookup_T[table + 1]):
            for bag in range(num_bags):
                position = nb.uint64(bag) * nb.uint64(width) + col_L[lookup]
                length = offsets[lookup * num_bags + bag + 1] - offsets[lookup * num_bags + bag]
                for _ in range(length):
                    row = ids[begin + taken]
                    if weighted:
                        position_N[taken] = position
                        key_N[size] = (row << _HALF) | taken
                    else:
                        key_N[size] = (row << _HALF) | position
                    size += nb.uint64((row & mask) == part)  # a row of another part is overwritten
                    taken += _ONE
        row_N = sort(key_N, spare_N, size, bits_T[table], 11 if size >= _MANY else 8)
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
                        prefetch(weight, weights + ahead + line)
                        if rule >= ADAM:
                            prefetch(state, states + ahead + line)
                        if rule == ADAM:
                            prefetch(second, seconds + ahead + line)
                        line += _LINE
                    if rule == ROWWISE_ADAGRAD:
                        prefetch(state, states + (later >> _HALF))
                    if rule == PARTIAL_ROWWISE_ADAM:
                        prefetch(second, seconds + (later >> _HALF))
                    line = stride if weighted else _ZERO
                    while line < stride:
                        prefetch(grad, (later & _LOW) + line)
                        line += _LINE
                position = row_N[number] & _LOW
                if weighted:
                    factor = weights_N[begin + position]
                    position = nb.uint64(position_N[position])
                    for col in range(dim):
                        sum_D[col] += factor * grad[position + nb.uint64(col)]
                else:
                    for col in range(dim):
                        sum_D[col] += grad[position + nb.uint64(col)]
                number += _ONE
            first_number, factor = weights + row * stride, rate
            if rule == ADAGRAD:
                position = states + row * stride
                for col in range(dim):
                    total = state[position + nb.uint64(col)] + sum_D[col] * sum_D[col]
                    state[position + nb.uint64(col)] = total
                    _moved(weight, first_number + nb.uint64(col), -rate * sum_D[col] / (np.sqrt(total) + eps))
            elif rule >= ADAM:
                position, second_position, root = states + row * stride, seconds + row, nb.float32(0)
                if rule == PARTIAL_ROWWISE_ADAM:
                    square = nb.float32(0)
                    for col in range(dim):
                        square += sum_D[col] * sum_D[col]
                    second[second_position] = betas[1] * second[second_position] + betas[3] * square / nb.float32(dim)
                    root = np.sqrt(second[second_position] / betas[5])
                else:
                    second_position = seconds + row * stride
                for col in range(dim):
                    moment = betas[0] * state[position + nb.uint64(col)] + betas[2] * sum_D[col]
                    state[position + nb.uint64(col)] = moment
                    if rule == ADAM:
                        total = betas[1] * second[second_position + nb.uint64(col)] + betas[3] * sum_D[col] * sum_D[col]
                        second[second_position + nb.uint64(col)] = total
                        root = np.sqrt(total / betas[5])
                    _moved(weight, first_number + nb.uint64(col), -rate * (moment / betas[4]) / (root + eps))
            else:
                if rule == ROWWISE_ADAGRAD:
                    square = nb.float32(0)
                    for col in range(dim):
                        square += sum_D[col] * sum_D[col]
                    total = state[states + row] + square / nb.float32(dim)
                    state[states + row] = total
                    factor = rate / (np.sqrt(total) + eps)
                for col in range(dim):
                    _moved(weight, first_number + nb.uint64(col), -factor * sum_D[col])
    return -1
