"""A training step in micro-batches: looks up and updates tables once, and runs the dense part once per micro-batch.

The result equals a step on the whole batch, but only the activations of one micro-batch are in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.models import Batch
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.train.errors import TrainError

SampleRange = tuple[int, int]


class LookedUp(nn.Module):
    """Replaces a sharded collection while the micro-batches of a batch go through the model.

    Args:
        name: name of the collection in the model.
        collection: called once here, for the whole batch.
        sparse: features of the whole batch.
    """

    def __init__(self, name: str, collection: nn.Module, sparse: KeyedJaggedTensor) -> None:
        super().__init__()
        self._name = name
        self._output: KeyedTensor | dict[str, JaggedTensor] = collection(sparse).wait()
        self._slices: list[list[torch.Tensor]] = [[] for _ in _tensors(self._output)]
        self._micro_batch: KeyedJaggedTensor | None = None
        self._rows: SampleRange = (0, 0)

    def begin(self, sparse: KeyedJaggedTensor, rows: SampleRange) -> None:
        """Prepare for the call with a micro-batch, which has the given range of rows of the batch."""
        self._micro_batch, self._rows = sparse, rows

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        if sparse is not self._micro_batch:
            raise TrainError(
                f"trainer.micro_batches: the model must pass batch.sparse unchanged to {self._name!r}, once a step; "
                f"set micro_batches to 1 for a model that looks up anything else"
            )
        self._micro_batch = None
        start, stop = self._rows
        if isinstance(self._output, KeyedTensor):
            values = self._slice(0, self._output.values(), start, stop)
            return KeyedTensor(self._output.keys(), self._output.length_per_key(), values)
        result = {}
        for index, (key, vectors) in enumerate(self._output.items()):
            lengths = vectors.lengths()
            offset, count = int(lengths[:start].sum()), int(lengths[start:stop].sum())
            values = self._slice(index, vectors.values(), offset, offset + count)
            result[key] = JaggedTensor(values, lengths=lengths[start:stop])
        return result

    def _slice(self, index: int, output: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        values = output[start:stop].detach().requires_grad_(output.requires_grad)
        self._slices[index].append(values)
        return values

    def backward(self) -> None:
        """Run the collection's backward with the gradients of all micro-batches."""
        tensors, gradients = [], []
        for output, slices in zip(_tensors(self._output), self._slices, strict=True):
            if output.requires_grad:
                tensors.append(output)
                gradients.append(torch.cat([torch.zeros_like(s) if s.grad is None else s.grad for s in slices]))
        if tensors:
            torch.autograd.backward(tensors, gradients)


def _tensors(output: KeyedTensor | dict[str, JaggedTensor]) -> list[torch.Tensor]:
    if isinstance(output, KeyedTensor):
        return [output.values()]
    return [vectors.values() for vectors in output.values()]


def step_in_micro_batches(
    model: DistributedModelParallel, batch: Batch, factor: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward of `factor` times the batch's mean loss; the caller steps the dense optimizer.

    Every rank runs `count` micro-batches, even of an empty batch. The last backward updates the tables.

    Args:
        batch: this rank's rows.
        factor: scales the mean loss of the batch.
        count: number of micro-batches; their sizes differ by at most one row.

    Returns:
        (mean loss, logits), detached; the loss of an empty batch is 0.
    """
    with _looked_up(model, batch.sparse) as collections:
        losses, logits = [], []
        for number in range(count):
            rows = (batch.rows * number // count, batch.rows * (number + 1) // count)
            micro_batch = micro_batch_of(batch, *rows)
            for collection in collections:
                collection.begin(micro_batch.sparse, rows)
            with _syncing(model, number == count - 1):
                loss, logit = model(micro_batch)
                share = micro_batch.total_weight / batch.total_weight if batch.total_weight else 0.0
                weighted = loss * (share * factor) if micro_batch.rows else logit.sum() * 0.0
                weighted.backward()
            losses.append(loss.detach() * share if micro_batch.rows else weighted.detach())
            logits.append(logit.detach())
    for collection in collections:
        collection.backward()
    return torch.stack(losses).sum(), torch.cat(logits)


@contextlib.contextmanager
def _looked_up(model: DistributedModelParallel, sparse: KeyedJaggedTensor) -> Iterator[list[LookedUp]]:
    """Replace the model's collections by their outputs for the whole batch while the body runs."""
    collections: Mapping[str, nn.Module] = model.sharded_modules()
    outputs = {path: LookedUp(path, collection, sparse) for path, collection in collections.items()}
    parents = {path: model.module.get_submodule(path.rpartition(".")[0]) for path in collections}
    for path, parent in parents.items():
        setattr(parent, path.rpartition(".")[2], outputs[path])
    try:
        yield list(outputs.values())
    finally:
        for path, parent in parents.items():
            setattr(parent, path.rpartition(".")[2], collections[path])


def _syncing(model: DistributedModelParallel, last: bool) -> contextlib.AbstractContextManager[None]:
    """All-reduce the dense gradients in the backward of the last micro-batch only."""
    dense = model.data_parallel
    return contextlib.nullcontext() if last or not isinstance(dense, DistributedDataParallel) else dense.no_sync()


def micro_batch_of(batch: Batch, start: int, stop: int) -> Batch:
    """The rows [start, stop) of a batch. Waits for its device."""
    weight = None if batch.weight is None else batch.weight[start:stop]
    lists = dict[str, torch.Tensor]()
    for name, sequence in batch.sequences.items():
        begin, end = int(sequence.offsets[start]), int(sequence.offsets[stop])
        lists |= {f"{name}.{field}": values[begin:end] for field, values in sequence.values.items()}
    sparse = _rows_of(batch.sparse, start, stop)
    return Batch(batch.dense[start:stop], sparse, batch.label[start:stop], weight, layout=batch.layout, lists=lists)


def _rows_of(sparse: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    keys, stride = sparse.keys(), sparse.stride()
    lengths_FB = sparse.lengths().view(len(keys), stride)
    offsets = sparse.offsets()[torch.arange(len(keys), device=sparse.lengths().device) * stride + start].tolist()
    counts = lengths_FB[:, start:stop].sum(1).tolist()
    spans = [slice(offset, offset + count) for offset, count in zip(offsets, counts, strict=True)]
    weights = sparse.weights_or_none()
    return KeyedJaggedTensor(
        keys,
        torch.cat([sparse.values()[span] for span in spans]),
        weights=None if weights is None else torch.cat([weights[span] for span in spans]),
        lengths=lengths_FB[:, start:stop].reshape(-1),
        stride=stop - start,
    )
