"""What a model is fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples: the dense features, the sparse features, and what is to be predicted.

    Args:
        dense: float32 [B, N]; N may be 0.
        sparse: ids of every sparse feature, stride B.
        label: float32 [B].
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor

    @property
    def rows(self) -> int:
        """B, the number of examples; 0 on a rank that has run out of data."""
        return self.label.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory())
