"""Collections with managed collisions, which remap ids before the lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection
from rayrec.torchrec.modules.mc_modules import ManagedCollisionCollection
from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import KeyedJaggedTensor

__getattr__ = names_left_out(__name__)


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """A collection with managed collisions. As in TorchRec, a row that is reassigned to another id keeps its vector.

    Args:
        embedding_module: the collection.
        managed_collision_collection: managed collisions of the same tables.
        return_remapped_features: also return the rows.
        allow_in_place_embed_weight_update: ignored.

    Raises:
        ValueError: the two have different tables.
    """

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        configs: Sequence[BaseEmbeddingConfig]
        if isinstance(embedding_module, EmbeddingBagCollection):
            configs = embedding_module.embedding_bag_configs()
        else:
            configs = embedding_module.embedding_configs()
        if list(configs) != list(managed_collision_collection.embedding_configs()):
            raise ValueError("the collection and its managed collisions have different tables")
        self._managed_collision_collection = managed_collision_collection
        self._return_remapped_features = return_remapped_features
        self._allow_in_place_embed_weight_update = allow_in_place_embed_weight_update
        self._embedding_module = embedding_module

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, KeyedJaggedTensor | None]:
        """Returns the output of the collection, and the rows if `return_remapped_features`, else None."""
        rows = self._managed_collision_collection(features, mutate_miss_lengths)
        out = self._embedding_module(rows)
        self._managed_collision_collection.evict()
        return out, rows if self._return_remapped_features else None

    def lookup_remapped_lengths_mask(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a mask of the nonempty lists."""
        return self._managed_collision_collection(features).lengths().to(torch.bool)


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` with managed collisions; has the arguments of the base class."""

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_collection(self) -> nn.Module:
        return self._embedding_module


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` with managed collisions; has the arguments of the base class."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_bag_collection(self) -> nn.Module:
        return self._embedding_module
