"""The planner of torch.distributed.checkpoint (DCP) for loads. A run that loads no checkpoint does without: its import
takes as long as half of rayrec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from rayrec.checkpoint.format import SavedTensor


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, for a state of `Rectangles` only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Like DCP's, without its first pass over the values, which replaces unknown objects by None."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].at(index.offset)


def metadata(tensors: Mapping[str, SavedTensor]) -> Metadata:
    """The metadata of saved tensors for DCP's planners."""
    return Metadata({key: _metadata(tensor) for key, tensor in tensors.items()})


def _metadata(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.size), chunks)
