"""Contexts and candidates, each mapped once, as one batch: every candidate's row has its context's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rayrec.data import Schema
from rayrec.inference.context import I64, joined_bags
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor


def with_contexts(
    contexts: Batch, rest: Batch, of_row: I64, schema: Schema, columns: frozenset[str], keys: Sequence[str]
) -> Batch:
    """The candidates' rows with what their contexts say.

    Args:
        contexts: C rows of the features in `columns`.
        rest: B rows of the others.
        of_row: [B], each row's context.
        schema: of whole rows; keys: sparse features of the rows, in order.
    """
    sparse = _sparse(contexts.sparse, rest.sparse, of_row, keys, schema.weighted)
    dense = torch.cat([contexts.dense[torch.from_numpy(of_row)], rest.dense], dim=1)
    return Batch(_in_order(dense, contexts.dense.shape[1], schema, columns), sparse, torch.zeros(len(of_row)))


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


def _in_order(both: torch.Tensor, own: int, schema: Schema, columns: frozenset[str]) -> torch.Tensor:
    """Numbers in the schema's order, of which the first `own` are the contexts'."""
    next_own, next_rest, order = 0, own, list[int]()
    for feature in schema.dense:
        if columns.issuperset(schema.sources(feature)):
            order += range(next_own, next_own + feature.width)
            next_own += feature.width
        else:
            order += range(next_rest, next_rest + feature.width)
            next_rest += feature.width
    return both if order == sorted(order) else both[:, order].contiguous()


def _sparse(
    contexts: KeyedJaggedTensor, rest: KeyedJaggedTensor, of_row: I64, keys: Sequence[str], weighted: bool
) -> KeyedJaggedTensor:
    """Bags are picked from the ids of both, put one after the other."""
    size, every = len(of_row), slice(None)
    picked, offsets = joined_bags(keys, size, ((contexts, every, of_row), (rest, every, every)))
    values = torch.cat([contexts.values(), rest.values()])[picked]
    weights = torch.cat([_weights(contexts), _weights(rest)])[picked] if weighted else None
    return KeyedJaggedTensor(list(keys), values, weights, offsets=offsets, stride=size)


def _weights(part: KeyedJaggedTensor) -> torch.Tensor:
    found = part.weights_or_none()
    return torch.ones(part.values().numel()) if found is None else found
