"""Contexts and candidates, each mapped once, as one batch: every candidate's row has its context's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rayrec.data import Schema
from rayrec.inference.context import I64, joined_bags
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """How contexts and candidates make up a row.

    Args:
        schema: of whole rows.
        columns: those that contexts hold.
        keys: sparse features of the rows, in order.
    """

    schema: Schema
    columns: frozenset[str]
    keys: tuple[str, ...]


def with_contexts(contexts: Batch, rest: Batch, of_row: I64, layout: Layout) -> Batch:
    """The candidates' rows with what their contexts say.

    Args:
        contexts: C rows of the features in `layout.columns`.
        rest: B rows of the others.
        of_row: [B], each row's context.
    """
    sparse = _sparse(contexts.sparse, rest.sparse, of_row, layout)
    return Batch(_dense(contexts.dense, rest.dense, of_row, layout), sparse, torch.zeros(len(of_row)))


def split(contexts: Batch, keys: Sequence[str]) -> tuple[KeyedJaggedTensor, Batch]:
    """The bags of some features, and the contexts without them."""
    sparse = contexts.sparse
    if not keys:
        return _picked(sparse, []), contexts
    places = {key: place for place, key in enumerate(sparse.keys())}
    rest = [place for key, place in places.items() if key not in keys]
    return _picked(sparse, [places[key] for key in keys]), replace(contexts, sparse=_picked(sparse, rest))


def _picked(sparse: KeyedJaggedTensor, places: list[int]) -> KeyedJaggedTensor:
    if places:
        return sparse if len(places) == len(sparse.keys()) else sparse.permute(places)
    nothing = torch.empty(0, dtype=torch.int64)
    return KeyedJaggedTensor([], nothing, lengths=nothing, stride=sparse.stride())


def _dense(contexts: torch.Tensor, rest: torch.Tensor, of_row: I64, layout: Layout) -> torch.Tensor:
    both = torch.cat([contexts[torch.from_numpy(of_row)], rest], dim=1)
    next_own, next_rest, order = 0, contexts.shape[1], list[int]()
    for feature in layout.schema.dense:
        if layout.columns.issuperset(layout.schema.sources(feature)):
            order += range(next_own, next_own + feature.width)
            next_own += feature.width
        else:
            order += range(next_rest, next_rest + feature.width)
            next_rest += feature.width
    return both if order == sorted(order) else both[:, order].contiguous()


def _sparse(contexts: KeyedJaggedTensor, rest: KeyedJaggedTensor, of_row: I64, layout: Layout) -> KeyedJaggedTensor:
    """Bags are picked from the ids of both, put one after the other."""
    size, every = len(of_row), slice(None)
    picked, offsets = joined_bags(layout.keys, size, ((contexts, every, of_row), (rest, every, every)))
    values = torch.cat([contexts.values(), rest.values()])[picked]
    weights = torch.cat([_weights(contexts), _weights(rest)])[picked] if layout.schema.weighted else None
    return KeyedJaggedTensor(list(layout.keys), values, weights, offsets=offsets, stride=size)


def _weights(part: KeyedJaggedTensor) -> torch.Tensor:
    found = part.weights_or_none()
    return torch.ones(part.values().numel()) if found is None else found
