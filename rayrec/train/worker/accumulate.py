"""One step in parts: the dense part works through a batch piece by piece, tables are looked up and updated once.

So a step in N parts is the step on the whole batch, for tables too, while only one part's activations are in memory.
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

Span = tuple[int, int]


class LookedUp(nn.Module):
    """Stands in for a sharded collection while the parts of a batch go through the model.

    Args:
        name: of the collection in the model.
        collection: looks up all rows of the batch, now.
        sparse: of all rows.
    """

    def __init__(self, name: str, collection: nn.Module, sparse: KeyedJaggedTensor) -> None:
        super().__init__()
        self._name = name
        self._whole: KeyedTensor | dict[str, JaggedTensor] = collection(sparse).wait()
        tensors = _tensors(self._whole)
        self._pieces: list[list[torch.Tensor]] = [[] for _ in tensors]
        self._part: KeyedJaggedTensor | None = None
        self._span: Span = (0, 0)

    def begin(self, part: KeyedJaggedTensor, span: Span) -> None:
        """The next call is for these rows."""
        self._part, self._span = part, span

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        if sparse is not self._part:
            raise TrainError(
                f"trainer.micro_batches: the model must give batch.sparse as it is to {self._name!r}, once a step; set "
                f"micro_batches to 1 for a model that looks up anything else"
            )
        self._part = None
        start, stop = self._span
        if isinstance(self._whole, KeyedTensor):
            piece = self._piece(0, self._whole.values(), start, stop)
            return KeyedTensor(self._whole.keys(), self._whole.length_per_key(), piece)
        out = {}
        for place, (key, vectors) in enumerate(self._whole.items()):
            lengths = vectors.lengths()
            before, inside = int(lengths[:start].sum()), int(lengths[start:stop].sum())
            piece = self._piece(place, vectors.values(), before, before + inside)
            out[key] = JaggedTensor(piece, lengths=lengths[start:stop])
        return out

    def _piece(self, place: int, whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        piece = whole[start:stop].detach().requires_grad_(whole.requires_grad)
        self._pieces[place].append(piece)
        return piece

    def backward(self) -> None:
        """Hand the gradients of all parts to the collection, at once."""
        tensors, gradients = [], []
        for whole, pieces in zip(_tensors(self._whole), self._pieces, strict=True):
            if whole.requires_grad:
                tensors.append(whole)
                gradients.append(torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in pieces]))
        if tensors:
            torch.autograd.backward(tensors, gradients)


def _tensors(found: KeyedTensor | dict[str, JaggedTensor]) -> list[torch.Tensor]:
    if isinstance(found, KeyedTensor):
        return [found.values()]
    return [vectors.values() for vectors in found.values()]


def step_in_parts(
    model: DistributedModelParallel, batch: Batch, factor: float, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward of `factor` times the batch's mean loss; the dense optimizer's step is left to the caller.

    Every rank goes through `parts` parts, also of an empty batch. Tables are updated by the last backward.

    Args:
        batch: this rank's rows.
        factor: of the mean loss of all of them.
        parts: as even as can be.

    Returns:
        (mean loss, logits), detached; the loss of an empty batch is 0.
    """
    with _looked_up(model, batch.sparse) as stand_ins:
        losses, logits = [], []
        for number in range(parts):
            span = (batch.rows * number // parts, batch.rows * (number + 1) // parts)
            part = part_of(batch, *span)
            for stand_in in stand_ins:
                stand_in.begin(part.sparse, span)
            with _syncing(model, number == parts - 1):
                loss, logit = model(part)
                share = part.total_weight / batch.total_weight if batch.total_weight else 0.0
                weighed = loss * (share * factor) if part.rows else logit.sum() * 0.0
                weighed.backward()
            losses.append(loss.detach() * share if part.rows else weighed.detach())
            logits.append(logit.detach())
    for stand_in in stand_ins:
        stand_in.backward()
    return torch.stack(losses).sum(), torch.cat(logits)


@contextlib.contextmanager
def _looked_up(model: DistributedModelParallel, sparse: KeyedJaggedTensor) -> Iterator[list[LookedUp]]:
    """The model with its collections replaced by what they give for all rows."""
    collections: Mapping[str, nn.Module] = model.sharded_modules()
    stand_ins = {path: LookedUp(path, collection, sparse) for path, collection in collections.items()}
    places = {path: model.module.get_submodule(path.rpartition(".")[0]) for path in collections}
    for path, parent in places.items():
        setattr(parent, path.rpartition(".")[2], stand_ins[path])
    try:
        yield list(stand_ins.values())
    finally:
        for path, parent in places.items():
            setattr(parent, path.rpartition(".")[2], collections[path])


def _syncing(model: DistributedModelParallel, last: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients of the dense part are exchanged in the last part's backward only."""
    wrapped = model.data_parallel
    return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """The rows [start, stop) of a batch; waits for the device that it lies on."""
    weight = None if batch.weight is None else batch.weight[start:stop]
    lists = dict[str, torch.Tensor]()
    for name, sequence in batch.sequences.items():
        first, last = int(sequence.offsets[start]), int(sequence.offsets[stop])
        lists |= {f"{name}.{value}": found[first:last] for value, found in sequence.values.items()}
    sparse = _rows_of(batch.sparse, start, stop)
    return Batch(batch.dense[start:stop], sparse, batch.label[start:stop], weight, layout=batch.layout, lists=lists)


def _rows_of(sparse: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    keys, stride = sparse.keys(), sparse.stride()
    lengths_FB = sparse.lengths().view(len(keys), stride)
    edges = sparse.offsets()[torch.arange(len(keys), device=sparse.lengths().device) * stride + start].tolist()
    counts = lengths_FB[:, start:stop].sum(1).tolist()
    spans = [slice(edge, edge + count) for edge, count in zip(edges, counts, strict=True)]
    weights = sparse.weights_or_none()
    return KeyedJaggedTensor(
        keys,
        torch.cat([sparse.values()[span] for span in spans]),
        weights=None if weights is None else torch.cat([weights[span] for span in spans]),
        lengths=lengths_FB[:, start:stop].reshape(-1),
        stride=stop - start,
    )
