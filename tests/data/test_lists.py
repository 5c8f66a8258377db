"""Bags in another order, against plain Python lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.arrays.lists import take_bags


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([np.int64, np.float32]))
def test_bags_are_taken_whole(data: st.DataObject, dtype: type) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=12))
    before, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    offsets = before + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.arange(int(offsets[-1]) + behind).astype(dtype)
    rows = st.lists(st.integers(0, len(lengths) - 1)) if lengths else st.just([])
    order = np.asarray(data.draw(rows), np.int64)
    taken, starts = take_bags(values, offsets, order)
    bags = [values[offsets[row] : offsets[row + 1]].tolist() for row in order]
    assert taken.dtype == dtype and taken.tolist() == [value for bag in bags for value in bag]
    assert np.diff(starts).tolist() == [len(bag) for bag in bags] and starts[0] == 0


@pytest.mark.parametrize("step", [1, 2])
def test_values_need_not_lie_side_by_side(step: int) -> None:
    values = np.arange(12)[::step]
    assert take_bags(values, np.array([0, 2, 3]), np.array([1, 0]))[0].tolist() == [2 * step, 0, step]
