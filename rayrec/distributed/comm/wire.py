"""What travels between ranks in a step, in bytes: the executors send by it, and the planner counts by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ID_BYTES = 8  # of an id, or a row number: int64
LENGTH_BYTES = 4  # of a bag's length: int32
WEIGHT_BYTES = 4  # of an id's weight: float32
VECTOR_ELEMENT_BYTES = 4  # of a number of a vector or gradient where it is used: float32
ROW = 32  # numbers that share a scale, unless told otherwise


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How numbers of vectors and gradients are written while they travel.

    Args:
        name: which format; `kernel.number_formats` writes and reads it.
        bytes: of a number.
        row: numbers that share a scale; 0: none is needed. Each rank's part is filled up to whole rows.
        row_bytes: of a row's scale.
    """

    name: str
    bytes: int
    row: int = 0
    row_bytes: int = 0

    def size(self, count: int) -> int:
        """Elements of the message that `count` numbers become; bytes where numbers share scales."""
        if not self.row:
            return count
        return -(-count // self.row) * (self.row * self.bytes + self.row_bytes)

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """The same of each part."""
        return [self.size(count) for count in counts] if self.row else list(counts)

    @property
    def mean_bytes(self) -> float:
        """Of a number, with its part of the scale."""
        return self.bytes + (self.row_bytes / self.row if self.row else 0.0)


FP32 = NumberFormat("fp32", 4)
FP16 = NumberFormat("fp16", 2)  # holds up to 65504; what is beyond is cut to that
BF16 = NumberFormat("bf16", 2)  # the range of float32 with 3 digits
FP8 = NumberFormat("fp8", 1)  # 1 sign, 4 exponent and 3 fraction bits; holds up to 0.9375, what is beyond is cut
FP8_WIDE = NumberFormat("fp8_wide", 1)  # 5 exponent and 2 fraction bits; up to 0.875


def fp8_rows(row: int = ROW, wide: bool = False) -> NumberFormat:
    """FP8 scaled by each row's greatest number, so that nothing is cut."""
    _check_row(row)
    return NumberFormat("fp8_wide_rows" if wide else "fp8_rows", 1, row, 4)


def int8_rows(row: int = ROW) -> NumberFormat:
    """256 steps between a row's least and greatest number."""
    _check_row(row)
    return NumberFormat("int8", 1, row, 8)


def _check_row(row: int) -> None:
    if row < 4 or row % 4:
        raise ValueError(f"{row} numbers that share a scale: must be a multiple of 4 from 4 on; try {ROW}")


FORMATS = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": fp8_rows(), "int8": int8_rows()}  # by the config's names


@dataclass(frozen=True, slots=True)
class Codec:
    """The number formats in which vectors and gradients travel.

    Numbers are multiplied by a scale while they travel: half precision holds nothing below 6e-8, which the gradients of
    a mean over a large batch are. A power of two rounds nothing.

    Args:
        forward: of vectors.
        backward: of gradients.
        backward_scale, forward_scale: while they travel as FP16 or BF16; other formats need none.
    """

    forward: NumberFormat = FP32
    backward: NumberFormat = FP32
    backward_scale: float = 1.0
    forward_scale: float = 1.0
