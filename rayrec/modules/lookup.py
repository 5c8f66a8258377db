"""`Lookup`: tables read by pooled features and by sequences, each stored and sharded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import nn

from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, InitFn, PoolingType
from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection, draw_seed, output_names
from rayrec.modules.pooling import pool_mean, pool_sum
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of a batch.

    Args:
        pooled: `[B, D]` of each pooled feature.
        by_id: `[T, D]` with lengths `[B]` of each sequence feature.
    """

    pooled: dict[str, torch.Tensor]
    by_id: dict[str, JaggedTensor]


class Lookup(nn.Module):
    """Embedding tables for bags and for sequences.

    A table that a sequence reads is in an `EmbeddingCollection` with all its features, and its bags are pooled on the
    rank of the sample. So one sharded table serves both, under any plan, in checkpoints and exports. The other tables
    are in an `EmbeddingBagCollection`, which exchanges only pooled vectors.

    An `EmbeddingCollection` has one width, as TorchRec's, so there is one for each width of tables that sequences read,
    and a step has the collectives of each: give these tables one `embedding_dim`.

    Args:
        tables: The tables. `pooling` applies to features that are not in `by_id`.
        by_id: The features that need the vector of each id.
        is_weighted: Whether ids carry weights, which multiply the vectors of bags.
        device: Device of the tables.
        seed: Seed of the initial weights.

    Raises:
        ValueError: No table reads a feature of `by_id`.
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
        feature_names = [feature for table in tables for feature in table.feature_names]
        for feature in by_id:
            if feature not in feature_names:
                raise ValueError(f"no table reads {feature!r}; tables read {feature_names}")
        seed = draw_seed() if seed is None else seed
        self.is_weighted = is_weighted
        shared = [table for table in tables if set(table.feature_names) & set(by_id)]
        bags = [table for table in tables if table not in shared]
        self.bags = EmbeddingBagCollection(bags, is_weighted, device=device, seed=seed) if bags else None
        self.sequences, by_width = nn.ModuleDict(), list[list[EmbeddingBagConfig]]()
        for width in sorted({table.embedding_dim for table in shared}):
            by_width.append([table for table in shared if table.embedding_dim == width])
            configs = [as_collection_table(table, table.feature_names) for table in by_width[-1]]
            self.sequences[f"dim{width}"] = EmbeddingCollection(configs, device=device, seed=seed)
        names_of = {table.name: names for table, names in zip(tables, output_names(list(tables)), strict=True)}
        # A collection names its outputs by its own tables: for each, its names and the names among all tables.
        self._names = [
            {
                own: name
                for table, names in zip(collection, output_names(collection), strict=True)
                for own, name in zip(names, names_of[table.name], strict=True)
            }
            for collection in (*by_width, bags)
        ]
        # (feature, output name, table, whether it is pooled)
        self._read = [
            (feature, name, table, feature not in by_id)
            for table in tables
            for feature, name in zip(table.feature_names, names_of[table.name], strict=True)
        ]
        self._shared = {table.name for table in shared}
        self.widths = {name: table.embedding_dim for _, name, table, _ in self._read}

    @property
    def pooled_names(self) -> list[str]:
        """Output names of pooled features, in the order of tables and their features."""
        return [name for _, name, _, pooled in self._read if pooled]

    def release_bags(self) -> EmbeddingBagCollection | None:
        """Returns the collection of bags, which a model then keeps under a name of its own and gives to `forward`."""
        bags, self.bags = self.bags, None
        return bags

    def forward(self, features: KeyedJaggedTensor, bags: nn.Module | None = None) -> Vectors:
        """Vectors of all features by output name (see `output_names`). Collective if tables are sharded.

        Args:
            bags: The collection of `release_bags`, or its sharded form.
        """
        bags = self.bags if bags is None else bags
        outputs = [collection(features) for collection in self.sequences.values()]
        pooled = {} if bags is None else _renamed(bags(features).to_dict(), self._names[-1])
        jagged: dict[str, JaggedTensor] = {}
        for vectors, names in zip(outputs, self._names, strict=False):
            jagged |= _renamed(vectors, names)
        for feature, name, table, is_bag in self._read:
            if is_bag and table.name in self._shared:
                pool = pool_mean if table.pooling is PoolingType.MEAN else pool_sum
                weights = features[feature].weights() if self.is_weighted else None
                vectors_of_ids = jagged.pop(name)
                pooled[name] = pool(vectors_of_ids.values(), vectors_of_ids.lengths(), weights)
        return Vectors({name: pooled[name] for name in self.pooled_names}, jagged)


def _renamed(outputs: Mapping[str, V], names: Mapping[str, str]) -> dict[str, V]:
    return {name: outputs[own] for own, name in names.items()}


def as_collection_table(
    table: BaseEmbeddingConfig, features: Sequence[str], init_fn: InitFn | None = None
) -> EmbeddingConfig:
    """The config of a table for lookups per id.

    Args:
        table: The table.
        features: The features that read it.
        init_fn: Initial weights for a table with neither `init_fn` nor a bound of its weights.
    """
    same = {f.name: getattr(table, f.name) for f in fields(EmbeddingConfig)}
    if table.weight_init_min is not None or table.weight_init_max is not None:
        init_fn = None
    return EmbeddingConfig(**{**same, "feature_names": list(features), "init_fn": table.init_fn or init_fn})
