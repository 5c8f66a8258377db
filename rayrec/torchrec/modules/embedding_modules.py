"""Embedding collections (defined in `rayrec.modules.embedding`) and their helpers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.modules.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from rayrec.modules.embedding import output_names as get_embedding_names_by_table

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "get_embedding_names_by_table",
    "process_pooled_embeddings",
    "reorder_inverse_indices",
]


def reorder_inverse_indices(
    inverse_indices: tuple[list[str], torch.Tensor] | None, feature_names: Sequence[str]
) -> torch.Tensor:
    """Returns the rows of inverse indices `[F, B]` in the order of `feature_names`; an empty tensor for None."""
    if inverse_indices is None:
        return torch.empty(0)
    keys, indices_FB = inverse_indices
    return indices_FB[[keys.index(name) for name in feature_names]]


def process_pooled_embeddings(pooled_embeddings: Sequence[torch.Tensor], inverse_indices: torch.Tensor) -> torch.Tensor:
    """Concatenates blocks to `[B, sum of dims]`, with rows selected by the inverse indices `[F, B]`."""
    if inverse_indices.numel():
        pooled_embeddings = [block[rows] for block, rows in zip(pooled_embeddings, inverse_indices.long(), strict=True)]
    return torch.cat(list(pooled_embeddings), dim=1)
