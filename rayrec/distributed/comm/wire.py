"""Number formats and sizes of messages between ranks, for executors and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ID_BYTES = 8  # an id or a row number, int64
LENGTH_BYTES = 4  # a bag's length, int32
WEIGHT_BYTES = 4  # an id's weight, float32
VECTOR_ELEMENT_BYTES = 4  # an element of a vector or gradient in lookups, float32
ROW = 32  # elements that share a scale, by default


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Format of the elements of vectors and gradients in messages; `kernel.number_formats` encodes and decodes it.

    Args:
        name: Name of the format.
        bytes: Bytes per element.
        row: Elements that share a scale, or 0 without scales. Each rank's message is padded to whole rows.
        row_bytes: Bytes of a row's scale.
    """

    name: str
    bytes: int
    row: int = 0
    row_bytes: int = 0

    def size(self, count: int) -> int:
        """Elements of a message of `count` numbers; bytes if the format has scales."""
        if not self.row:
            return count
        return -(-count // self.row) * (self.row * self.bytes + self.row_bytes)

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """`size` of each count."""
        return [self.size(count) for count in counts] if self.row else list(counts)

    @property
    def mean_bytes(self) -> float:
        """Bytes per element, with its share of the scale."""
        return self.bytes + (self.row_bytes / self.row if self.row else 0.0)


FP32 = NumberFormat("fp32", 4)
"""float32, the default."""
FP16 = NumberFormat("fp16", 2)
"""float16: up to 65504; larger values are clipped."""
BF16 = NumberFormat("bf16", 2)
"""bfloat16: the range of float32 with 3 digits."""
FP8 = NumberFormat("fp8", 1)
"""1 sign, 4 exponent and 3 fraction bits: up to 0.9375; larger values are clipped."""
FP8_WIDE = NumberFormat("fp8_wide", 1)
"""1 sign, 5 exponent and 2 fraction bits: up to 0.875; larger values are clipped."""


def fp8_rows(row: int = ROW, wide: bool = False) -> NumberFormat:
    """FP8 scaled by each row's largest element, so that nothing is clipped."""
    _check_row(row)
    return NumberFormat("fp8_wide_rows" if wide else "fp8_rows", 1, row, 4)


def int8_rows(row: int = ROW) -> NumberFormat:
    """256 steps between a row's smallest and largest element."""
    _check_row(row)
    return NumberFormat("int8", 1, row, 8)


def _check_row(row: int) -> None:
    if row < 4 or row % 4:
        raise ValueError(f"row={row}: the elements that share a scale must be a multiple of 4, at least 4; try {ROW}")


FORMATS = {
    "fp32": FP32,
    "fp16": FP16,
    "bf16": BF16,
    "fp8": fp8_rows(),
    "int8": int8_rows(),
}  # by config name


@dataclass(frozen=True, slots=True)
class Codec:
    """The number formats of vectors and gradients in messages.

    Messages are multiplied by a scale, and divided by it on arrival: half precision has nothing below 6e-8, and the
    gradients of a mean over a large batch are smaller. A power of two loses no precision.

    Args:
        forward: of vectors.
        backward: of gradients.
        backward_scale, forward_scale: for FP16 and BF16; other formats need none.
    """

    forward: NumberFormat = FP32
    backward: NumberFormat = FP32
    backward_scale: float = 1.0
    forward_scale: float = 1.0
