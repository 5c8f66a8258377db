"""Quantized collections over several ranks, for tables that exceed the memory of one process.

A plan is a list of rectangles, as in training: a table is on a single rank, or it is cut by rows, by columns, or both.
Each rank scores its own batch: it sends ids to the ranks that own the rows, and receives the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.distributed.plan.cuts import by_rows, whole
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import Shard
from rayrec.inference.graph import replace_module
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.modules.embedding import feature_names, output_names
from rayrec.quant import EmbeddingBagCollection, EmbeddingCollection, TablePlace
from rayrec.quant.check import IdCheck
from rayrec.sparse.keyed_jagged_tensor import check_input
from rayrec.torchrec.inference.sharded_route import Ids, Route
from rayrec.torchrec.inference.sharded_tables import check_shards, local_shards
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

TablePlan = Mapping[str, Sequence[Shard]]


def shard_quant_model(model: nn.Module, group: comm.Group, plan: ShardingPlan | TablePlan | None = None) -> nn.Module:
    """Shards every quantized collection of a model in place; returns the model. Collective, as is each later call of
    the model.

    Results are bit-identical to those of the unsharded collections, except for sums over a table that is cut by rows,
    which are added in another order.

    Args:
        model: from `quantize_inference_model`, identical on every rank; or with the tables of an export
            (`read_exported_tables`), which need not fit in memory.
        group: gloo for CPU ranks, NCCL for GPUs.
        plan: a plan for the model before quantization, or the shards of each table. By default, tables are balanced by
            bytes, and a table larger than the mean per rank is cut by rows.

    Raises:
        ValueError: no quantized collection, or shards that do not cover each table exactly once.
    """
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    collections = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    if not collections:
        raise ValueError("the model has no quantized embedding collection; call quantize_inference_model first")
    size = 1 if group is None else group.size()
    tables = [table for _, module in collections for table in module.places]
    if isinstance(plan, ShardingPlan):
        plan = {name: sharding.shards for module in plan.plan.values() for name, sharding in module.items()}
    shards = _balanced(tables, size) if plan is None else plan
    for table in tables:
        check_shards(table, shards.get(table.table, ()), size)
    for path, module in collections:
        sharded: nn.Module
        if isinstance(module, EmbeddingBagCollection):
            sharded = ShardedQuantEmbeddingBagCollection(module, group, shards)
        else:
            sharded = ShardedQuantEmbeddingCollection(module, group, shards)
        model = replace_module(model, path, sharded)
    return model


class _Sharded(nn.Module):
    """Base class of sharded quantized collections. A call is collective."""

    _bags = False

    def __init__(self, unsharded: Any, configs: Sequence[Any], group: comm.Group, shards: TablePlan) -> None:
        super().__init__()
        self._configs, self._weighted = list(configs), False
        self._id_check = IdCheck.of_tables(configs)
        self._route = Route(configs, shards, group)
        self.local = local_shards(unsharded, configs, self._route)
        self._reads = [(config, name) for config in configs for name in config.feature_names]
        self._keys = [name for names in output_names(configs) for name in names]

    def _check(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Checks the input. Raises ValueError on every rank if the input of one is invalid."""
        try:
            check_input(features, feature_names(self._configs), self._weighted)
            features = features.expanded() if self._bags else features
            self._id_check(features)
        except ValueError as error:
            self._route.refuse(error, features.device())
        return features

    def _vectors(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Returns `[n, D]` for each feature of each table, with one row per bag or per id."""
        route, device, stride = self._route, features.device(), features.stride() if self._bags else 1
        ids = {stream: Ids.of(features[stream.feature], stream.rows, self._weighted) for stream in route.streams}
        if not self._bags:
            ids = {stream: stream_ids.as_one_bag() for stream, stream_ids in ids.items()}
        vectors_R = [self._flat(request) for request in route.ask(ids, stride, device)]
        sizes_R = [
            [(stride if self._bags else len(ids[read.stream].values)) * read.shard.cols.size for read in reads]
            for reads in route.reads_R
        ]
        outputs = [
            torch.zeros(stride if self._bags else len(features[name].values()), config.embedding_dim, device=device)
            for config, name in self._reads
        ]
        answers = route.answer(vectors_R, [sum(sizes) for sizes in sizes_R])
        for reads, sizes, vectors in zip(route.reads_R, sizes_R, answers, strict=True):
            for read, block in zip(reads, vectors.split(sizes), strict=True):
                positions = None if self._bags else ids[read.stream].positions
                columns = outputs[read.output][:, read.shard.cols.start : read.shard.cols.stop]
                columns[slice(None) if positions is None else positions] += block.view(-1, columns.shape[1])
        return outputs

    def _flat(self, request: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the vectors of the local shards, flat and concatenated."""
        vectors = {} if self.local is None else self.local(request)
        blocks = [vectors[key] if self._bags else vectors[key].values() for key in vectors.keys()]
        return torch.cat([torch.empty(0, device=request.device()), *(block.reshape(-1) for block in blocks)])


class ShardedQuantEmbeddingBagCollection(_Sharded):
    """The sharded version of a quantized EmbeddingBagCollection. A call is collective."""

    _bags = True

    def __init__(self, unsharded: EmbeddingBagCollection, group: comm.Group, shards: TablePlan) -> None:
        super().__init__(unsharded, unsharded.embedding_bag_configs(), group, shards)
        self._weighted = unsharded.is_weighted()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._weighted

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the output of the unsharded collection.

        Raises:
            ValueError: the input of a rank is invalid; other ranks raise an error that names this rank.
        """
        features = self._check(features)
        outputs = self._vectors(features)
        for (config, name), sums in zip(self._reads, outputs, strict=True):
            if config.pooling is PoolingType.MEAN and config.name in self._route.cut_by_rows:
                sums /= features[name].lengths().clamp(min=1)[:, None]  # ranks return sums of their rows
        return KeyedTensor(self._keys, [config.embedding_dim for config, _ in self._reads], torch.cat(outputs, dim=1))


class ShardedQuantEmbeddingCollection(_Sharded):
    """The sharded version of a quantized EmbeddingCollection, with bit-identical output. A call is collective."""

    def __init__(self, unsharded: EmbeddingCollection, group: comm.Group, shards: TablePlan) -> None:
        super().__init__(unsharded, unsharded.embedding_configs(), group, shards)
        self._need_indices = unsharded.need_indices()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._need_indices

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the output of the unsharded collection.

        Raises:
            ValueError: the input of a rank is invalid; other ranks raise an error that names this rank.
        """
        out = {}
        for key, (_, name), vectors in zip(self._keys, self._reads, self._vectors(self._check(features)), strict=True):
            ids = features[name]
            weights = ids.values() if self._need_indices else None
            out[key] = JaggedTensor(values=vectors, weights=weights, lengths=ids.lengths())
        return out


def _balanced(tables: Sequence[TablePlace], size: int) -> TablePlan:
    """Assigns each table, largest first, to the rank with the fewest bytes. Cuts a table by rows over all ranks if it
    is larger than the mean per rank."""
    mean_bytes = sum(table.end - table.begin for table in tables) / size
    rank_bytes, shards = [0] * size, {}
    for table in sorted(tables, key=lambda table: (table.begin - table.end, table.table)):
        is_large = table.end - table.begin > mean_bytes
        ranks = list(range(size)) if is_large else [rank_bytes.index(min(rank_bytes))]
        shards[table.table] = (by_rows if is_large else whole)(table.table, table.rows, table.dim, ranks)
        for shard in shards[table.table]:
            rank_bytes[shard.rank] += shard.rows.size * table.row_bytes
    return shards
