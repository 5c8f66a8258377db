"""`Lookup`: tables that some features read as bags and others id by id, each table stored and sharded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, InitFn, PoolingType
from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection, draw_seed, output_names
from rayrec.modules.pooling import pool_mean, pool_sum
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Vectors:
    """What tables give for a batch.

    Args:
        pooled: of each feature that is read as bags `[B, D]`.
        by_id: of each other one the vectors of its ids, `[T, D]` with lengths `[B]`.
    """

    pooled: dict[str, torch.Tensor]
    by_id: dict[str, JaggedTensor]


class Lookup(nn.Module):
    """Embedding tables for bags and for sequences.

    A table that a sequence reads is in an `EmbeddingCollection`, with all of its features; bags of it are pooled on the
    own rank. So it is one sharded table for both, under any plan, in checkpoints and exports. The other tables are in
    an `EmbeddingBagCollection`, where only pooled vectors are exchanged.

    Args:
        tables: their `pooling` holds for features that are read as bags.
        by_id: the features that are looked up id by id.
        is_weighted: ids carry weights, which multiply the vectors of bags.
        device: of the tables.
        seed: of the tables' first weights.

    Raises:
        ValueError: no table reads a feature of `by_id`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        by_id: Sequence[str],
        is_weighted: bool = False,
        device: torch.device | str | None = "meta",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        known = [feature for table in tables for feature in table.feature_names]
        for feature in by_id:
            if feature not in known:
                raise ValueError(f"no table reads {feature!r}; tables read {known}")
        seed = draw_seed() if seed is None else seed
        self.is_weighted = is_weighted
        shared = [table for table in tables if set(table.feature_names) & set(by_id)]
        bags = [table for table in tables if table not in shared]
        self.bags = EmbeddingBagCollection(bags, is_weighted, device=device, seed=seed) if bags else None
        widths = sorted({table.embedding_dim for table in shared})
        self.sequences = nn.ModuleDict()
        for width in widths:
            configs = [
                as_collection_table(table, table.feature_names) for table in shared if table.embedding_dim == width
            ]
            self.sequences[f"dim{width}"] = EmbeddingCollection(configs, device=device, seed=seed)
        # (feature, its name in the output, its table, whether it is pooled) of the shared tables
        self._read = [
            (feature, name, table, feature not in by_id)
            for table, names in zip(tables, output_names(list(tables)), strict=True)
            for feature, name in zip(table.feature_names, names, strict=True)
        ]
        self._shared = {table.name for table in shared}
        self.widths = {name: table.embedding_dim for _, name, table, _ in self._read}

    @property
    def pooled_names(self) -> list[str]:
        """Names of the pooled vectors, in the order of tables and their features."""
        return [name for _, name, _, pooled in self._read if pooled]

    def forward(self, features: KeyedJaggedTensor) -> Vectors:
        """Vectors of all features, by name in the output (see `output_names`). Collective where tables are sharded."""
        found = [collection(features) for collection in self.sequences.values()]
        pooled = {} if self.bags is None else self.bags(features).to_dict()
        jagged: dict[str, JaggedTensor] = {}
        for vectors in found:
            jagged |= {name: vectors[name] for name in vectors}
        for feature, name, table, is_bag in self._read:
            if is_bag and table.name in self._shared:
                pool = pool_mean if table.pooling is PoolingType.MEAN else pool_sum
                weights = features[feature].weights() if self.is_weighted else None
                own = jagged.pop(name)
                pooled[name] = pool(own.values(), own.lengths(), weights)
        return Vectors({name: pooled[name] for name in self.pooled_names}, jagged)


def as_collection_table(
    table: BaseEmbeddingConfig, features: Sequence[str], init_fn: InitFn | None = None
) -> EmbeddingConfig:
    """A table for lookups id by id of `features`.

    Args:
        init_fn: of its first weights, where it has none of its own.
    """
    same = {f.name: getattr(table, f.name) for f in fields(EmbeddingConfig)}
    return EmbeddingConfig(**{**same, "feature_names": list(features), "init_fn": table.init_fn or init_fn})
