"""Computes what was known at the time of a rating: earlier likes and dislikes, counts and means.

"Earlier" is strict: ratings with the same timestamp do not see each other, because MovieLens users often rate a page
within one second.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)


class Earlier(NamedTuple):
    """R ratings sorted by owner (a user or an item) and time, each with its past.

    The past of the rating at position p is positions `first_R[p] : end_R[p]`: same owner, strictly earlier. `order_R`
    has the input row at each position.
    """

    order_R: Ints
    first_R: Ints
    end_R: Ints


def earlier(owner_R: Ints, time_R: Ints) -> Earlier:
    """Sorts ratings by owner and time, stably."""
    order_R = np.lexsort((time_R, owner_R))
    owner_R, time_R = owner_R[order_R], time_R[order_R]
    new_owner_R = np.r_[True, owner_R[1:] != owner_R[:-1]]
    new_time_R = new_owner_R | np.r_[True, time_R[1:] != time_R[:-1]]
    return Earlier(order_R, _last_start(new_owner_R), _last_start(new_time_R))


def last_items(past: Earlier, item_R: Ints, selected_R: NDArray[np.bool_], count: int) -> pa.ListArray:
    """The latest `count` selected items of each rating's past, oldest first; R lists, in the order of the input rows.

    Args:
        item_R: item of each input row.
        selected_R: True for input rows that count, e.g. likes.
    """
    selected_positions_C = np.flatnonzero(selected_R[past.order_R])
    end_R = np.searchsorted(selected_positions_C, past.end_R)
    first_R = np.maximum(np.searchsorted(selected_positions_C, past.first_R), end_R - count)
    first_R, length_R = _unsort(past, first_R), _unsort(past, end_R - first_R)
    offsets = np.r_[0, np.cumsum(length_R)]
    positions = np.repeat(first_R - offsets[:-1], length_R) + np.arange(offsets[-1])
    items = item_R[past.order_R][selected_positions_C][positions]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(items, pa.int64()))


def count_and_sum(past: Earlier, value_R: Floats | Ints) -> tuple[Ints, Floats]:
    """The number of ratings in each rating's past, and the sum of their values; [R] each, in input order."""
    total_R = np.r_[0.0, np.cumsum(value_R[past.order_R], dtype=np.float64)]
    return _unsort(past, past.end_R - past.first_R), _unsort(past, total_R[past.end_R] - total_R[past.first_R])


def _last_start(starts_R: NDArray[np.bool_]) -> Ints:
    """For each position, the last position up to it where `starts_R` is true."""
    return np.maximum.accumulate(np.where(starts_R, np.arange(len(starts_R)), 0))


def _unsort(past: Earlier, sorted_R: NDArray[Number]) -> NDArray[Number]:
    result_R = np.empty_like(sorted_R)
    result_R[past.order_R] = sorted_R
    return result_R
