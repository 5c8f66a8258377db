"""Tensors as rectangles per rank: what a rank has, to save, or requests, to load.

To load, the planner of torch.distributed.checkpoint (DCP) intersects the requested rectangles with the saved ones, see
`load_planner`. Resharding needs nothing else. A tensor that every rank has is one rectangle; `save_plan` chooses who
saves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint import ChunkStorageMetadata

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Rectangle:
    """A slice of a larger tensor.

    Args:
        offsets: offsets of the slice, one per dimension.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[Rectangle]:
        """Views of at most `max_bytes` that make up the rectangle: ranges of rows, or of columns if a row is larger."""
        shape = self.tensor.shape
        dim = next((d for d, size in enumerate(shape) if size > 1), None)
        if dim is None or self.tensor.nbytes <= max_bytes:
            yield self
            return
        length = max(1, max_bytes * shape[dim] // self.tensor.nbytes)
        for start in range(0, shape[dim], length):
            offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
            piece = Rectangle(offsets, self.tensor.narrow(dim, start, min(length, shape[dim] - start)))
            yield from piece.pieces(max_bytes)


class Rectangles:
    """This rank's rectangles of a tensor of size `shape`."""

    def __init__(self, shape: Sequence[int], rectangles: Sequence[Rectangle]) -> None:
        self.shape = torch.Size(shape)
        self.rectangles = list(rectangles)
        self._at = {torch.Size(rectangle.offsets): rectangle.tensor for rectangle in self.rectangles}

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Rectangles:
        """A whole tensor as one rectangle."""
        return cls(tensor.shape, [Rectangle((0,) * tensor.dim(), tensor)])

    def to_save(self, max_bytes: int = PIECE_BYTES) -> Rectangles:
        """The same data in rectangles of at most `max_bytes`."""
        return Rectangles(self.shape, [piece for rectangle in self.rectangles for piece in rectangle.pieces(max_bytes)])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The rectangles in the form of DCP, which calls this."""
        from torch.distributed.checkpoint import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(item.offsets), item.tensor.shape) for item in self.rectangles]

    def at(self, offsets: torch.Size | None) -> torch.Tensor:
        """The rectangle at these offsets."""
        assert offsets is not None
        return self._at[offsets]
