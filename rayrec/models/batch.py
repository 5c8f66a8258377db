"""`Batch`: the input of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples: dense features, sparse features and labels.

    Args:
        dense: float32 [B, N]; N may be 0.
        sparse: ids of every sparse feature, stride B.
        label: float32 [B]; with T labels [B, T], NaN where a label was not observed.
        weight: float32 [B], sample weights; None: all 1.
        group: int64 [B], the group of each example; only in evaluation, and if the schema has one.
        time: int64 [B], seconds since 1970 (UTC); as `group`.
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
        """The same batch on `device`."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in pinned host memory."""
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of the tensors on a GPU from reuse until the work queued on `stream` is done."""
        self.sparse.record_stream(stream)
        for part in (self.dense, self.label, self.weight, self.group, self.time):
            if part is not None and part.is_cuda:
                part.record_stream(stream)

    def _each(self, act: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        parts = (getattr(self, field.name) for field in fields(self))
        return Batch(*(None if part is None else act(part) for part in parts))  # type: ignore[arg-type]
