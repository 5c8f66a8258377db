"""The terms of a shard's cost: seconds of one step and bytes of memory."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds that a shard adds to its rank in one step, by term (formulas in `seconds.py`)."""

    lookup: float = 0.0
    input_intra: float = 0.0
    input_inter: float = 0.0
    output_intra: float = 0.0
    output_inter: float = 0.0
    backward: float = 0.0
    gradient_intra: float = 0.0
    gradient_inter: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class ShardBytes(NamedTuple):
    """Bytes that a shard takes on its rank, by term (formulas in `memory.py`).

    `host` is host memory of a GPU rank; all other terms are memory of the compute device (RAM for "cpu").
    """

    weights: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    ids: float = 0.0
    vectors: float = 0.0
    cache: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        return sum(self[:-1])
