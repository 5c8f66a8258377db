"""Allocates large NumPy arrays from Arrow's memory pool.

The pool reuses freed memory. NumPy asks the kernel for new pages for each large array, and the page faults cost more
than the computations here.
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
    """An uninitialized array of `size` elements."""
    kind = np.dtype(dtype)
    return np.frombuffer(pa.allocate_buffer(size * kind.itemsize), dtype=kind)


def take_rows(array: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Rows `order[0]`, `order[1]`, … of an array [n, …]. Indices must be in `[0, n)`; they are not checked."""
    out = empty(len(order) * math.prod(array.shape[1:]), array.dtype).reshape(len(order), *array.shape[1:])
    return np.take(array, order, axis=0, out=out, mode="clip")
