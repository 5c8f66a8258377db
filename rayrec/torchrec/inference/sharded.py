"""Quantized collections over several ranks, for tables that one process cannot hold.

A plan is a list of rectangles, as in training: a table lies whole on one rank, or is cut by rows, by columns, or both.
Every rank scores its own batch: ids go to the ranks that have their rows, vectors come back.
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
from rayrec.quant.check import check_lookups
from rayrec.sparse.keyed_jagged_tensor import check_input
from rayrec.torchrec.inference.sharded_route import Ids, Route
from rayrec.torchrec.inference.sharded_tables import check_shards, own_part
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

TablePlan = Mapping[str, Sequence[Shard]]


def shard_quant_model(model: nn.Module, group: comm.Group, plan: ShardingPlan | TablePlan | None = None) -> nn.Module:
    """Leaves each rank its own part of every quantized collection; every rank calls it, and then the model, together.

    The same numbers come out as of the unsharded collections: to the last bit, but for sums over a table that is cut by
    rows, which are added up in another order.

    Args:
        model: as `quantize_inference_model` gives it, the same on every rank; or with the tables of an export
            (`read_exported_tables`), which no process needs to hold. It is changed and returned.
        group: gloo for CPU ranks, NCCL for GPUs.
        plan: the planner's for the model before it was quantized, or the shards of each table; by default tables are
            dealt out by their bytes, and one that is larger than a rank's share is cut by rows.

    Raises:
        ValueError: no quantized collection, or shards that do not hold each table once, on ranks of the group.
    """
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    if not found:
        raise ValueError("the model has no quantized embedding collection; call quantize_inference_model first")
    size = 1 if group is None else group.size()
    places = [place for _, module in found for place in module.places]
    if isinstance(plan, ShardingPlan):
        plan = {table: of.shards for tables in plan.plan.values() for table, of in tables.items()}
    shards = _dealt(places, size) if plan is None else plan
    for place in places:
        check_shards(place, shards.get(place.table, ()), size)
    for path, module in found:
        made: nn.Module
        if isinstance(module, EmbeddingBagCollection):
            made = ShardedQuantEmbeddingBagCollection(module, group, shards)
        else:
            made = ShardedQuantEmbeddingCollection(module, group, shards)
        model = replace_module(model, path, made)
    return model


class _Sharded(nn.Module):
    """As the quantized collection that it is made of. A call is a collective."""

    _bags = False

    def __init__(self, unsharded: Any, configs: Sequence[Any], group: comm.Group, shards: TablePlan) -> None:
        super().__init__()
        self._configs, self._weighted = list(configs), False
        self._route = Route(configs, shards, group)
        self.own = own_part(unsharded, configs, self._route)
        self._reads = [(config, name) for config in configs for name in config.feature_names]
        self._keys = [name for names in output_names(configs) for name in names]

    def _check(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """
        Raises:
            ValueError: they cannot be used; every rank then raises.
        """
        try:
            check_input(features, feature_names(self._configs), self._weighted)
            features = features.expanded() if self._bags else features
            check_lookups(features, self._configs)
        except ValueError as error:
            self._route.refuse(error, features.device())
        return features

    def _vectors(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """For each feature of each table `[n, D]`: a row a bag, or a row an id."""
        route, device, stride = self._route, features.device(), features.stride() if self._bags else 1
        ids = {of: Ids.of(features[of.feature], of.rows, self._weighted) for of in route.streams}
        if not self._bags:
            ids = {of: each.as_one_bag() for of, each in ids.items()}
        found = [self._flat(request) for request in route.ask(ids, stride, device)]
        rows_R = [[stride if self._bags else len(ids[read.stream].values) for read in reads] for reads in route.reads_R]
        sizes_R = [
            [rows * read.shard.cols.size for rows, read in zip(rows_of, reads, strict=True)]
            for rows_of, reads in zip(rows_R, route.reads_R, strict=True)
        ]
        outputs = [
            torch.zeros(stride if self._bags else len(features[name].values()), config.embedding_dim, device=device)
            for config, name in self._reads
        ]
        answers = route.answer(found, [sum(sizes) for sizes in sizes_R])
        for reads, sizes, vectors in zip(route.reads_R, sizes_R, answers, strict=True):
            for read, part in zip(reads, vectors.split(sizes), strict=True):
                at = None if self._bags else ids[read.stream].at
                columns = outputs[read.output][:, read.shard.cols.start : read.shard.cols.stop]
                columns[slice(None) if at is None else at] += part.view(-1, columns.shape[1])
        return outputs

    def _flat(self, request: KeyedJaggedTensor) -> torch.Tensor:
        """Of this rank's shards, one after the other."""
        found = {} if self.own is None else self.own(request)
        of_shards = [found[key] if self._bags else found[key].values() for key in found.keys()]
        return torch.cat([torch.empty(0, device=request.device()), *(of.reshape(-1) for of in of_shards)])


class ShardedQuantEmbeddingBagCollection(_Sharded):
    """As the quantized collection that it is made of. A call is a collective."""

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
        """As the unsharded collection's.

        Raises:
            ValueError: as the unsharded one's, on the rank whose batch it is; the others name that rank.
        """
        features = self._check(features)
        outputs = self._vectors(features)
        for (config, name), sums in zip(self._reads, outputs, strict=True):
            if config.pooling is PoolingType.MEAN and config.name in self._route.cut_by_rows:
                sums /= features[name].lengths().clamp(min=1)[:, None]  # a mean over ranks is one of sums
        return KeyedTensor(self._keys, [config.embedding_dim for config, _ in self._reads], torch.cat(outputs, dim=1))


class ShardedQuantEmbeddingCollection(_Sharded):
    """As the quantized collection that it is made of, to the last bit. A call is a collective."""

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
        """As the unsharded collection's.

        Raises:
            ValueError: as the unsharded one's, on the rank whose batch it is; the others name that rank.
        """
        out = {}
        for key, (_, name), vectors in zip(self._keys, self._reads, self._vectors(self._check(features)), strict=True):
            ids = features[name]
            weights = ids.values() if self._need_indices else None
            out[key] = JaggedTensor(values=vectors, weights=weights, lengths=ids.lengths())
        return out


def _dealt(places: Sequence[TablePlace], size: int) -> TablePlan:
    """Each table to the rank that has the fewest bytes so far, the largest first; over all ranks, where it is larger
    than a rank's share of all."""
    share = sum(place.end - place.begin for place in places) / size
    held, shards = [0] * size, {}
    for place in sorted(places, key=lambda place: (place.begin - place.end, place.table)):
        cut = place.end - place.begin > share
        ranks = list(range(size)) if cut else [held.index(min(held))]
        shards[place.table] = (by_rows if cut else whole)(place.table, place.rows, place.dim, ranks)
        for shard in shards[place.table]:
            held[shard.rank] += shard.rows.size * place.row_bytes
    return shards
