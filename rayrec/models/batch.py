"""`Batch`, the input of a model, and `Sequence`, a group of its lists with equal lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a retriever computes on the host for a training step, so that the step never waits for the device.

    Args:
        drawn: `[C]`, the candidates that the loss draws.
        lookup: ids of the batch and of `drawn`: the input of the model's collection, which a `TrainPipeline`
            recognizes. None: the model looks up ids of its own.
        index: int64 `[n]` by name, e.g. positions; copied to the device as one tensor.
        widths: widths of the buckets of histories, if `index` has a layout.
        pool_sizes: for losses that read the positives of all ranks, the number of each rank in `index["pool"]`, which
            then has those of all ranks; for in-batch losses with hard negatives, and `index` also has the distinct
            ids, "met", with their counts, "times_met". None: "pool" has this rank's.
        numbers: float32 `[C, N]`, dense features of `drawn`; None: they have none.
    """

    drawn: torch.Tensor
    lookup: KeyedJaggedTensor | None = None
    index: Mapping[str, torch.Tensor] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    pool_sizes: tuple[int, ...] | None = None
    numbers: torch.Tensor | None = None

    def map(self, function: Callable[[Any], Any]) -> Prepared:
        """The same with `function` applied to all tensors."""
        names = [*self.index, ""]
        tensors = [*self.index.values(), self.drawn]
        packed: torch.Tensor = function(_packed(tensors))
        parts = dict(zip(names, packed.split([len(tensor) for tensor in tensors]), strict=True))
        lookup = None if self.lookup is None else function(self.lookup)
        numbers = None if self.numbers is None else function(self.numbers)
        return replace(self, drawn=parts.pop(""), lookup=lookup, index=parts, numbers=numbers)

    def tensors(self) -> list[torch.Tensor]:
        return [self.drawn, *self.index.values(), *([] if self.numbers is None else [self.numbers])]


def _packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tensors one after the other, without a copy if they lie so in memory already, e.g. pinned memory."""
    first, total = tensors[0], sum(len(tensor) for tensor in tensors)
    starts = accumulate((len(tensor) for tensor in tensors), initial=first.storage_offset())
    storage = first.untyped_storage().data_ptr()
    if all(
        tensor.is_contiguous() and tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == start
        for tensor, start in zip(tensors, starts, strict=False)
    ):
        return first.as_strided((total,), (1,))
    return torch.cat(tensors)


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
        prepared: what a retriever adds on the host; see `Retriever.prepare`.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    weight: torch.Tensor | None = None
    group: torch.Tensor | None = None
    time: torch.Tensor | None = None
    layout: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lists: Mapping[str, torch.Tensor] = field(default_factory=dict)
    prepared: Prepared | None = None

    @property
    def looked_up(self) -> KeyedJaggedTensor:
        """The input of the model's collections."""
        return self.sparse if self.prepared is None or self.prepared.lookup is None else self.prepared.lookup

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
        added = [] if self.prepared is None else self.prepared.tensors()
        if self.looked_up is not self.sparse:
            self.looked_up.record_stream(stream)
        for tensor in (self.dense, self.label, self.weight, self.group, self.time, *self.lists.values(), *added):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _map(self, function: Callable[[Any], Any]) -> Batch:
        others = ("layout", "lists", "prepared")
        tensors = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in others}
        mapped = {name: None if tensor is None else function(tensor) for name, tensor in tensors.items()}
        lists = {name: function(tensor) for name, tensor in self.lists.items()}
        prepared = None if self.prepared is None else self.prepared.map(function)
        return Batch(**mapped, layout=self.layout, lists=lists, prepared=prepared)  # type: ignore[arg-type]
