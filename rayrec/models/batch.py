"""What a model is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples: the dense features, the sparse features, and what is to be predicted.

    Args:
        dense: float32 [B, N]; N may be 0.
        sparse: ids of every sparse feature, stride B.
        label: float32 [B]; of T labels [B, T], NaN where one was not observed.
        weight: float32 [B], how much each example counts; None: all alike.
        group: int64 [B], equal for examples of one group; time: int64 [B], seconds since 1970 (UTC). In evaluation,
            where the schema has them.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    weight: torch.Tensor | None = None
    group: torch.Tensor | None = None
    time: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """B, the number of examples; 0 on a rank that has run out of data."""
        return self.label.shape[0]

    @property
    def total_weight(self) -> float:
        """The sum of the examples' weights, B without weights. Waits for the device where the batch is on one."""
        return float(self.rows) if self.weight is None else float(self.weight.sum(dtype=torch.float64))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._each(lambda part: part.pin_memory())

    def _each(self, act: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        parts = (getattr(self, field.name) for field in fields(self))
        return Batch(*(None if part is None else act(part) for part in parts))  # type: ignore[arg-type]
