"""`Batch`, the input of a model, and `Sequence`, a group of its lists with equal lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Sequence:
    """Lists of B rows with equal lengths, oldest first; T positions in total.

    Args:
        ids: JaggedTensor of each id feature: table rows int64 [T], and offsets [B + 1], the same for all.
        values: times int64 [T], seconds since 1970, or numbers float32 [T], by name.
    """

    ids: Mapping[str, JaggedTensor]
    values: Mapping[str, torch.Tensor]

    @property
    def offsets(self) -> torch.Tensor:
        """`[B + 1]`: the start of each row, and the end of the last."""
        return next(iter(self.ids.values())).offsets()

    @property
    def lengths(self) -> torch.Tensor:
        """`[B]`."""
        return next(iter(self.ids.values())).lengths()


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples: dense features, sparse features and labels.

    Args:
        dense: float32 [B, N]; N may be 0.
        sparse: ids of every sparse feature, including sequences; stride B.
        label: float32 [B]; with T labels [B, T], NaN for a label that was not observed.
        weight: float32 [B], sample weights; None: all 1.
        group: int64 [B], the group of each example; only in evaluation, if the schema has one.
        time: int64 [B], seconds since 1970 (UTC); only in evaluation, if the schema has one.
        layout: names of the sequences, with the features of `sparse` in each.
        lists: times and numbers of the sequences, by `sequence.name`; read them from `sequences`.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    weight: torch.Tensor | None = None
    group: torch.Tensor | None = None
    time: torch.Tensor | None = None
    layout: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lists: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> dict[str, Sequence]:
        """The schema's sequences; their ids are views of `sparse`."""
        return {
            name: Sequence(
                {feature: self.sparse[feature] for feature in features},
                {key.removeprefix(f"{name}."): v for key, v in self.lists.items() if key.startswith(f"{name}.")},
            )
            for name, features in self.layout.items()
        }

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
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in pinned host memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of the tensors on a GPU from reuse until the work queued on `stream` is done."""
        self.sparse.record_stream(stream)
        for tensor in (self.dense, self.label, self.weight, self.group, self.time, *self.lists.values()):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _map(self, function: Callable[[Any], Any]) -> Batch:
        tensors = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("layout", "lists")}
        mapped = {name: None if tensor is None else function(tensor) for name, tensor in tensors.items()}
        lists = {name: function(tensor) for name, tensor in self.lists.items()}
        return Batch(**mapped, layout=self.layout, lists=lists)  # type: ignore[arg-type]
