"""Embedding collections on one process: the modules that users write, and the oracle of every sharding test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules import init
from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.sparse.jagged_tensor import JaggedTensor
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, check_input
from rayrec.sparse.keyed_tensor import KeyedTensor

Config = TypeVar("Config", bound=BaseEmbeddingConfig)


def output_names(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """For each table, the output name of each of its features: `feature`, or `feature@table` if several tables read
    it."""
    features = [f for table in tables for f in table.feature_names]
    return [[f if features.count(f) == 1 else f"{f}@{t.name}" for f in t.feature_names] for t in tables]


def feature_names(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """The distinct features that the tables read, in order."""
    return list(dict.fromkeys(f for table in tables for f in table.feature_names))


def smallest_tables(tables: Sequence[Config]) -> dict[str, Config]:
    """For each feature the smallest table that reads it, which bounds its ids."""
    smallest: dict[str, Config] = {}
    for table in tables:
        for name in table.feature_names:
            if name not in smallest or table.num_embeddings < smallest[name].num_embeddings:
                smallest[name] = table
    return smallest


def submodule_name(name: str, taken: Collection[str] = ()) -> str:
    """A name for a table that `torch.nn.ModuleDict` accepts: the name itself if possible.

    A dot becomes `_`; the name of an attribute of every ModuleDict, such as `type`, or a name in `taken` gets a `_` at
    its end.
    """
    attributes, fitting = nn.ModuleDict(), name.replace(".", "_")
    while fitting in taken or hasattr(attributes, fitting):
        fitting += "_"
    return fitting


def check_tables(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Raises ValueError for a table without a name or features, a duplicate name or feature, or a name that is not
    valid for a submodule."""
    names = [table.name for table in tables]
    for table in tables:
        if not table.name or names.count(table.name) > 1:
            raise ValueError(f"table {table.name!r}: every table needs a unique name; there are {names}")
        if table.name != submodule_name(table.name):
            raise ValueError(
                f"table {table.name!r}: torch cannot hold a submodule of this name (it has a dot, or is an attribute "
                f"of every nn.ModuleDict); call it {submodule_name(table.name)!r}, for example"
            )
        if not table.feature_names:
            raise ValueError(f"table {table.name!r}: feature_names is empty; name the features that read it")
        if len(set(table.feature_names)) < len(table.feature_names):
            raise ValueError(f"table {table.name!r}: feature_names has duplicates: {table.feature_names}")


def outside_rows(feature: str, ids: torch.Tensor, table: BaseEmbeddingConfig) -> ValueError | None:
    """The error for the first id of a feature outside its table, or None if all ids are inside."""
    rows = table.num_embeddings
    outside = ids[(ids < 0) | (ids >= rows)]
    if not outside.numel():
        return None
    return ValueError(
        f"feature {feature!r}: id {int(outside[0])} is outside the rows [0, {rows}) of table {table.name!r}; map ids "
        "to rows (for example by hash) or give the table more rows"
    )


@contextmanager
def naming_ids(table: BaseEmbeddingConfig, feature: str, ids: torch.Tensor) -> Iterator[None]:
    """Raises the error of `outside_rows` if an id outside the table makes the lookup in the body fail.

    The lookup itself checks every id, so valid batches are not read twice.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        named = outside_rows(feature, ids, table)
        if named is None:
            raise
        raise named from error


def one_node(module: nn.Module, features: torch.fx.Proxy) -> Any:
    """The result of a module in a model that `torch.fx` traces: its checks need numbers, so it is one node."""
    tracer: Any = features.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (features,), {})


def check_trained(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Raises ValueError for an empty list of tables, or a data type that cannot be trained."""
    if not tables:
        raise ValueError("the collection has no tables")
    for table in tables:
        if not table.data_type.dtype.is_floating_point:
            raise ValueError(
                f"table {table.name!r}: data_type {table.data_type.value} cannot be trained; use FP32, FP16 or BF16, "
                "and quantize the trained model (rayrec.quant)"
            )


def tables_of(collection: nn.Module) -> tuple[Sequence[BaseEmbeddingConfig], nn.ModuleDict]:
    """Configs and tables (by name) of a collection of this module."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs(), collection.embedding_bags
    assert isinstance(collection, EmbeddingCollection)
    return collection.embedding_configs(), collection.embeddings


def fill_tables(collection: EmbeddingBagCollection | EmbeddingCollection) -> None:
    """Fills every table from the collection's seed. Does nothing on the meta device."""
    configs, tables = tables_of(collection)
    for config in configs:
        weight = tables.get_parameter(f"{config.name}.weight")
        if not weight.is_meta:
            init.fill(weight, config, collection.seed)


def draw_seed() -> int:
    """Draws a seed from torch's generator, which `torch.manual_seed` sets."""
    return int(torch.randint(1 << 62, (), dtype=torch.int64))


class EmbeddingBagCollectionInterface(nn.Module, ABC):
    """Interface of pooled lookups, for the collection of this module or your own."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors `[B, sum of dims]`."""

    @abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """Whether ids carry weights."""


class EmbeddingCollectionInterface(nn.Module, ABC):
    """Interface of lookups per id, for the collection of this module or your own."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Vectors of the ids of each feature."""

    @abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""

    @abstractmethod
    def need_indices(self) -> bool:
        """Whether the output's weights hold the ids."""

    @abstractmethod
    def embedding_dim(self) -> int:
        """Width of every table."""

    @abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Embedding tables with pooled lookups: one vector per sample and feature.

    Args:
        tables: The tables with the features that read them.
        is_weighted: Whether ids carry weights, which multiply their vectors before pooling. A weighted mean divides by
            the number of ids, not by the sum of weights, under every sharding.
        device: "meta" allocates nothing; sharding then fills each shard on its rank.
        seed: Seed of the initial weights. Default: drawn from torch's generator.

    Raises:
        ValueError: A table without name or features, or with a duplicate or invalid name.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        check_trained(tables)
        self._embedding_bag_configs = tuple(tables)
        self._is_weighted = is_weighted
        self.seed = draw_seed() if seed is None else seed
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            if table.pooling not in (PoolingType.SUM, PoolingType.MEAN):
                raise ValueError(f"table {table.name!r}: pooling must be SUM or MEAN, not {table.pooling.name}")
            self.embedding_bags[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.pooling.value.lower(),
                include_last_offset=True,
                _weight=torch.empty(
                    table.num_embeddings, table.embedding_dim, device=device, dtype=table.data_type.dtype
                ),
            )
        self._output_names = output_names(tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills every table from the seed; does nothing on the meta device."""
        fill_tables(self)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._embedding_bag_configs)

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors `[B, sum of dims]` in the order of tables and their features.

        Args:
            features: Ids of every feature that a table reads. Other features are ignored.

        Raises:
            ValueError: A feature is missing, weights of a weighted collection are missing, an id is outside its table,
                or batch sizes vary by feature without inverse indices.
        """
        if isinstance(features, torch.fx.Proxy):
            return one_node(self, features)
        check_input(features, feature_names(self._embedding_bag_configs), self._is_weighted)
        if features.device().type == "meta":  # lengths have no values
            names = [name for names in self._output_names for name in names]
            dims = [config.embedding_dim for config in self._embedding_bag_configs for _ in config.feature_names]
            return KeyedTensor(names, dims, torch.empty(features.stride(), sum(dims), device="meta"))
        inverse = features.inverse_indices_or_none()
        if inverse is None:
            features = features.expanded()
        pooled, keys = [], []
        for config, names in zip(self._embedding_bag_configs, self._output_names, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                ids = features[feature]
                with naming_ids(config, feature, ids.values()):
                    bags_BD = self._pool(config, ids).float()
                if inverse is not None:
                    bags_BD = bags_BD[inverse[1][inverse[0].index(feature)]]
                pooled.append(bags_BD)
                keys.append(name)
        return KeyedTensor(keys, [bags.shape[1] for bags in pooled], torch.cat(pooled, dim=1))

    def _pool(self, config: EmbeddingBagConfig, ids: JaggedTensor) -> torch.Tensor:
        table = self.embedding_bags[config.name]
        values, offsets = ids.values(), ids.offsets().to(ids.values().dtype)
        weight: torch.Tensor = self.embedding_bags.get_parameter(f"{config.name}.weight")
        if not self._is_weighted and weight.dtype == torch.float32:
            return table(values, offsets)
        if weight.dtype != torch.float32:  # embedding_bag would round sums of 16-bit numbers to 16 bits
            weight, values = F.embedding(values, weight).float(), torch.arange(len(values), device=values.device)
        weights = ids.weights() if self._is_weighted else None
        offsets = offsets.to(values.dtype)
        bags_BD = F.embedding_bag(
            values, weight, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        if config.pooling is PoolingType.MEAN:
            bags_BD = bags_BD / ids.lengths().clamp(min=1)[:, None]
        return bags_BD


class EmbeddingCollection(EmbeddingCollectionInterface):
    """Embedding tables that return the vector of each id.

    Args:
        tables: The tables, all of one `embedding_dim`, with the features that read them.
        device, seed: As for `EmbeddingBagCollection`.
        need_indices: Whether the output's weights hold the ids.
        use_gather_select, use_gather_select_per_sharding: Accepted for TorchRec, not used.

    Raises:
        ValueError: As for `EmbeddingBagCollection`, or tables of different widths.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Mapping[str, bool] | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        check_trained(tables)
        widths = {table.name: table.embedding_dim for table in tables}
        if len(set(widths.values())) > 1:
            raise ValueError(f"all tables of an EmbeddingCollection need one embedding_dim; there are {widths}")
        self._embedding_configs = tuple(tables)
        self._need_indices = need_indices
        self.seed = draw_seed() if seed is None else seed
        self.embeddings = nn.ModuleDict()
        for table in tables:
            weight = torch.empty(table.num_embeddings, table.embedding_dim, device=device, dtype=table.data_type.dtype)
            self.embeddings[table.name] = nn.Embedding(table.num_embeddings, table.embedding_dim, _weight=weight)
        self._output_names = output_names(tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills every table from the seed; does nothing on the meta device."""
        fill_tables(self)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._embedding_configs)

    def embedding_dim(self) -> int:
        return self._embedding_configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        return self._output_names

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Vectors of the ids of each feature: `values [N, D]` with the feature's lengths.

        Raises:
            ValueError: A feature is missing, or an id is outside its table.
        """
        if isinstance(features, torch.fx.Proxy):
            return one_node(self, features)
        check_input(features, feature_names(self._embedding_configs))
        outputs: dict[str, JaggedTensor] = {}
        for config, names in zip(self._embedding_configs, self._output_names, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                ids = features[feature]
                with naming_ids(config, feature, ids.values()):
                    vectors_ND = self.embeddings[config.name](ids.values()).float()
                outputs[name] = JaggedTensor(
                    values=vectors_ND,
                    weights=ids.values() if self._need_indices else None,
                    lengths=ids.lengths(),
                )
        return outputs
