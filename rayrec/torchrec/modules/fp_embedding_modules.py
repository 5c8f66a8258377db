"""`torchrec.modules.fp_embedding_modules`: a weighted collection with feature processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rayrec.modules.embedding import EmbeddingBagCollection, feature_names
from rayrec.torchrec.modules.feature_processor_ import FeatureProcessor, FeatureProcessorsCollection
from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import KeyedJaggedTensor

__getattr__ = names_left_out(__name__)

__all__ = ["FeatureProcessedEmbeddingBagCollection"]


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """A weighted embedding bag collection with feature processors, which compute the weights.

    Args:
        embedding_bag_collection: a collection with `is_weighted=True`; DistributedModelParallel shards it in place.
        feature_processors: a processor per feature, by name, or one for all features.

    Raises:
        ValueError: the collection is not weighted, or the processors do not match the features of the tables.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError("the collection is not weighted; create it with EmbeddingBagCollection(is_weighted=True)")
        self._embedding_bag_collection: nn.Module = embedding_bag_collection
        self._feature_processors: nn.Module = (
            feature_processors
            if isinstance(feature_processors, FeatureProcessorsCollection)
            else _by_feature(embedding_bag_collection, feature_processors)
        )

    def is_weighted(self) -> bool:
        """Returns True; the processors compute weights."""
        return True

    def split(self) -> tuple[nn.Module, nn.Module]:
        """Returns the processors and the collection."""
        return self._feature_processors, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Returns the output of the collection for the weighted ids, a KeyedTensor; lazy if it is sharded."""
        return self._embedding_bag_collection(self._processed(features))

    def _processed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if isinstance(self._feature_processors, FeatureProcessorsCollection):
            weighted: KeyedJaggedTensor = self._feature_processors(features)
            return weighted
        assert isinstance(self._feature_processors, nn.ModuleDict)
        names = list(self._feature_processors)
        ordered = features.permute([features.index_per_key()[name] for name in names])
        weights = [process(ordered[name]).weights() for name, process in self._feature_processors.items()]
        return ordered.with_weights(torch.cat(weights))


def _by_feature(collection: EmbeddingBagCollection, processors: Mapping[str, FeatureProcessor]) -> nn.ModuleDict:
    names = feature_names(collection.embedding_bag_configs())
    mismatch = sorted(set(names) ^ set(processors))
    if mismatch:
        problem = "no processor" if mismatch[0] in names else "a processor, but no table that reads it"
        raise ValueError(f"feature {mismatch[0]!r} has {problem}; pass one processor for each of {names}")
    return nn.ModuleDict({name: processors[name] for name in names})
