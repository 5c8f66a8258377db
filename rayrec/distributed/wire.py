"""What travels between ranks in a step, in bytes: the executors send by it, and the planner counts by it."""

from __future__ import annotations

ID_BYTES = 8  # of an id, or a row number: int64
LENGTH_BYTES = 4  # of a bag's length: int32
WEIGHT_BYTES = 4  # of an id's weight: float32
VECTOR_ELEMENT_BYTES = 4  # of a number of a vector or gradient, unless a codec says otherwise: float32
