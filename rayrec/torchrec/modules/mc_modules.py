"""Managed collisions, which assign the rows of a table to the most used ids of a larger range.

A module (`mch_module`) maps the ids of one table by a policy (`mc_policies`); `ManagedCollisionCollection` has one
module per table. Under DistributedModelParallel, every rank counts the ids of all ranks, so all ranks make the same
decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.torchrec.modules.mc_module import Features, ManagedCollisionModule
from rayrec.torchrec.modules.mc_policies import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from rayrec.torchrec.modules.mch_module import MCHManagedCollisionModule
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "DistanceLFU_EvictionPolicy",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionModule",
    "apply_mc_method_to_jt_dict",
    "average_threshold_filter",
    "dynamic_threshold_filter",
    "probabilistic_threshold_filter",
]


class ManagedCollisionCollection(nn.Module):
    """Maps the ids of all tables of a collection to rows.

    Args:
        managed_collision_modules: module of each table, by name.
        embedding_configs: the tables; `num_embeddings` equals the output size of the module.
        need_preprocess: ignored.

    Raises:
        ValueError: a table without module or with another size; or several tables read the same feature.
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        for config in embedding_configs:
            if config.name not in managed_collision_modules:
                raise ValueError(f"table {config.name!r} has no managed collision module")
            size = managed_collision_modules[config.name].output_size()
            if size != config.num_embeddings:
                raise ValueError(
                    f"table {config.name!r}: num_embeddings={config.num_embeddings}, but its managed collision module "
                    f"has {size} rows"
                )
        names = [name for config in embedding_configs for name in config.feature_names]
        shared = next((name for name in names if names.count(name) > 1), None)
        if shared is not None:
            raise ValueError(
                f"feature {shared!r} is read by several tables, which have different managed collisions; copy the "
                "feature under another name for each table"
            )
        self._names = names
        self._managed_collision_modules = nn.ModuleDict(dict(managed_collision_modules))
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        return {table: module.buckets() for table, module in self._modules_by_table().items()}

    def _modules_by_table(self) -> dict[str, Any]:
        return dict(self._managed_collision_modules.items())

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Replaces ids by rows, with keys in the order of tables and their features.

        Args:
            features: ids of all features of the tables; other features are dropped.
        """
        if features.keys() != self._names:
            features = features.permute([features.keys().index(name) for name in self._names])
        modules = self._modules_by_table()
        table_features = features.split([len(config.feature_names) for config in self._embedding_configs])
        rows = []
        for config, table_ids in zip(self._embedding_configs, table_features, strict=True):
            ids = JaggedTensor(table_ids.values(), lengths=table_ids.lengths())
            rows.append(modules[config.name]({config.name: ids}, mutate_miss_lengths)[config.name].values())
        return KeyedJaggedTensor(
            keys=self._names,
            values=torch.cat(rows),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

    def evict(self) -> dict[str, torch.Tensor | None]:
        """Returns the rows of each table that were reassigned since the last call."""
        return {table: module.evict() for table, module in self._modules_by_table().items()}

    def open_slots(self) -> dict[str, torch.Tensor]:
        """Returns the number of free rows of each table."""
        return {table: module.open_slots() for table, module in self._modules_by_table().items()}


def apply_mc_method_to_jt_dict(mc_module: nn.Module, method: str, features_dict: Features) -> Features:
    """Calls a method of a module with the features."""
    return getattr(mc_module, method)(features_dict)
