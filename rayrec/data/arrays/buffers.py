"""Memory for large arrays, from Arrow's pool.

The pool keeps what is freed and gives it out again; numpy asks the kernel for new pages for every large array, and
touching those for the first time costs more than what is computed here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.floating]


def empty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of `size` numbers that hold anything."""
    kind = np.dtype(dtype)
    return np.frombuffer(pa.allocate_buffer(size * kind.itemsize), dtype=kind)


def taken(array: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The rows `order[0]`, `order[1]`, … of an array [n, …], each in `[0, n)`, which is not checked."""
    out = empty(len(order) * math.prod(array.shape[1:]), array.dtype).reshape(len(order), *array.shape[1:])
    return np.take(array, order, axis=0, out=out, mode="clip")
