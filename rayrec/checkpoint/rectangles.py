"""Tensors of which each rank holds rectangles, in the form that torch.distributed.checkpoint saves and loads.

Loading asks for rectangles of its own; DCP finds where they meet the saved ones. That is all of resharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, DefaultSavePlanner, WriteItem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType


@dataclass(frozen=True)
class Rectangle:
    """A part of a two-dimensional tensor, from row `row` and column `col`."""

    row: int
    col: int
    tensor: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.row, self.col]), self.tensor.shape)


class Rectangles:
    """This rank's rectangles of one tensor of size `shape`."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[Rectangle]) -> None:
        self.shape = torch.Size(shape)
        self.pieces = list(pieces)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=self.shape,
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [piece.chunk for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(piece.tensor for piece in self.pieces if piece.chunk.offsets == index.offset)


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also knows `Rectangles`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Rectangles) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which also knows `Rectangles`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As DCP's, without its first pass over the values, which turns objects that it does not know into None."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Rectangles) else super().lookup_tensor(index)
