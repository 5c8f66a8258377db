"""Joins contexts and candidates, each mapped once, into a batch: a candidate's row includes its context's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rayrec.data import Schema
from rayrec.inference.context import I64, joined_bags
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor


def with_contexts(
    contexts: Batch, candidates: Batch, context_of: I64, schema: Schema, columns: frozenset[str], keys: Sequence[str]
) -> Batch:
    """
    Args:
        contexts: C rows with the features that read `columns`.
        candidates: B rows with all other features.
        context_of: [B], index of each candidate's context.
        schema: Of complete rows.
        columns: Columns of the contexts.
        keys: Sparse features of the result, in order.
    """
    sparse = _sparse(contexts.sparse, candidates.sparse, context_of, keys, schema.weighted)
    dense = torch.cat([contexts.dense[torch.from_numpy(context_of)], candidates.dense], dim=1)
    return Batch(_in_order(dense, contexts.dense.shape[1], schema, columns), sparse, torch.zeros(len(context_of)))


def split(contexts: Batch, keys: Sequence[str]) -> tuple[KeyedJaggedTensor, Batch]:
    """Splits contexts into the bags of some features, and the contexts without these features."""
    sparse = contexts.sparse
    if not keys:
        return _selected(sparse, []), contexts
    indices = {key: index for index, key in enumerate(sparse.keys())}
    remaining = [index for key, index in indices.items() if key not in keys]
    return _selected(sparse, [indices[key] for key in keys]), replace(contexts, sparse=_selected(sparse, remaining))


def _selected(sparse: KeyedJaggedTensor, indices: list[int]) -> KeyedJaggedTensor:
    if indices:
        return sparse if len(indices) == len(sparse.keys()) else sparse.permute(indices)
    empty = torch.empty(0, dtype=torch.int64)
    return KeyedJaggedTensor([], empty, lengths=empty, stride=sparse.stride())


def _in_order(dense: torch.Tensor, context_width: int, schema: Schema, columns: frozenset[str]) -> torch.Tensor:
    """Reorders numbers to the schema's order; the first `context_width` columns are from the contexts."""
    next_context, next_candidate, order = 0, context_width, list[int]()
    for feature in schema.dense:
        if columns.issuperset(schema.sources(feature)):
            order += range(next_context, next_context + feature.width)
            next_context += feature.width
        else:
            order += range(next_candidate, next_candidate + feature.width)
            next_candidate += feature.width
    return dense if order == sorted(order) else dense[:, order].contiguous()


def _sparse(
    contexts: KeyedJaggedTensor, candidates: KeyedJaggedTensor, context_of: I64, keys: Sequence[str], weighted: bool
) -> KeyedJaggedTensor:
    """Gathers the bags from the concatenated ids of contexts and candidates."""
    size, all_rows = len(context_of), slice(None)
    indices, offsets = joined_bags(keys, size, ((contexts, all_rows, context_of), (candidates, all_rows, all_rows)))
    values = torch.cat([contexts.values(), candidates.values()])[indices]
    weights = torch.cat([_weights(contexts), _weights(candidates)])[indices] if weighted else None
    return KeyedJaggedTensor(list(keys), values, weights, offsets=offsets, stride=size)


def _weights(sparse: KeyedJaggedTensor) -> torch.Tensor:
    weights = sparse.weights_or_none()
    return torch.ones(sparse.values().numel()) if weights is None else weights
