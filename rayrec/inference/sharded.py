"""Quantized collections over several ranks, for tables that one process cannot hold.

A plan is a list of rectangles, as in training: a table lies whole on one rank, or is cut by rows, by columns, or both.
Every rank scores its own batch: ids go to the ranks that have their rows, vectors come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.distributed.plan.cuts import by_rows, whole
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import Shard
from rayrec.inference.sharded_route import Ids, Route
from rayrec.inference.sharded_tables import check_shards, own_bags, own_sequences
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.modules.embedding import check_features, feature_names, output_names
from rayrec.quant import EmbeddingBagCollection, EmbeddingCollection, TablePlace
from rayrec.quant.check import check_lookups
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

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
        if not path:
            return made
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made)
    return model


class ShardedQuantEmbeddingBagCollection(nn.Module):
    """As the quantized collection that it is made of. A call is a collective."""

    def __init__(self, unsharded: EmbeddingBagCollection, group: comm.Group, shards: TablePlan) -> None:
        super().__init__()
        self._configs, self._is_weighted = unsharded.embedding_bag_configs(), unsharded.is_weighted()
        self._route = Route(self._configs, shards, group)
        self.own = own_bags(unsharded, self._route)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def is_weighted(self) -> bool:
        return self._is_weighted

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """As the unsharded collection's.

        Raises:
            ValueError: as the unsharded one's, on the rank whose batch it is; the others name that rank.
        """
        route, device = self._route, features.device()
        try:
            features = self._checked(features)
        except ValueError as error:
            route.refuse(error, device)
        ids = {stream: Ids.of(features[stream.feature], stream.rows, self._is_weighted) for stream in route.streams}
        requests, stride = route.ask(ids, features.stride(), device), features.stride()
        nothing = torch.empty(0, device=device)
        found = [nothing if self.own is None else self.own(request).values() for request in requests]
        widths_R = [[read.shard.cols.size for read in reads] for reads in route.reads_R]
        answers = route.answer(found, [stride * sum(widths) for widths in widths_R])
        outputs = self._outputs(stride, device)
        for reads, widths, vectors in zip(route.reads_R, widths_R, answers, strict=True):
            for read, part in zip(reads, vectors.view(stride, sum(widths)).split(widths, dim=1), strict=True):
                outputs[read.output][:, read.shard.cols.start : read.shard.cols.stop] += part
        return self._finished(outputs, features)

    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        check_features(features, feature_names(self._configs))
        if self._is_weighted and features.weights_or_none() is None:
            raise ValueError("the collection is weighted, but the input has no weights")
        features = features.expanded()
        check_lookups(features, self._configs)
        return features

    def _outputs(self, stride: int, device: torch.device) -> list[torch.Tensor]:
        """Zeros `[B, D]` for each feature of each table."""
        return [torch.zeros(stride, c.embedding_dim, device=device) for c in self._configs for _ in c.feature_names]

    def _finished(self, outputs: Sequence[torch.Tensor], features: KeyedJaggedTensor) -> KeyedTensor:
        """Sums over tables that are cut by rows become means where the table asks for them."""
        reads = [(config, name) for config in self._configs for name in config.feature_names]
        for (config, name), sums in zip(reads, outputs, strict=True):
            if config.pooling is PoolingType.MEAN and config.name in self._route.cut_by_rows:
                sums /= features[name].lengths().clamp(min=1)[:, None]
        keys = [name for names in output_names(self._configs) for name in names]
        return KeyedTensor(keys, [config.embedding_dim for config, _ in reads], torch.cat(list(outputs), dim=1))


class ShardedQuantEmbeddingCollection(nn.Module):
    """As the quantized collection that it is made of, to the last bit. A call is a collective."""

    def __init__(self, unsharded: EmbeddingCollection, group: comm.Group, shards: TablePlan) -> None:
        super().__init__()
        self._configs, self._need_indices = unsharded.embedding_configs(), unsharded.need_indices()
        self._route = Route(self._configs, shards, group)
        self.own = own_sequences(unsharded, self._route)

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
        route, device = self._route, features.device()
        try:
            check_features(features, feature_names(self._configs))
            check_lookups(features, self._configs)
        except ValueError as error:
            route.refuse(error, device)
        ids = {of: Ids.of(features[of.feature], of.rows, weighted=False).as_one_bag() for of in route.streams}
        found = [self._vectors(of) for of in route.ask(ids, 1, device)]
        sizes_R = [[(len(ids[read.stream].values), read.shard.cols.size) for read in reads] for reads in route.reads_R]
        answers = route.answer(found, [sum(n * width for n, width in sizes) for sizes in sizes_R])
        names = [name for config in self._configs for name in config.feature_names]
        dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]
        outputs = [
            torch.empty(len(features[name].values()), dim, device=device) for name, dim in zip(names, dims, strict=True)
        ]
        for reads, sizes, vectors in zip(route.reads_R, sizes_R, answers, strict=True):
            parts = vectors.split([n * width for n, width in sizes])
            for read, size, part in zip(reads, sizes, parts, strict=True):
                columns = outputs[read.output][:, read.shard.cols.start : read.shard.cols.stop]
                at = ids[read.stream].at
                columns[slice(None) if at is None else at] = part.view(size)
        return self._jagged(features, names, outputs)

    def _vectors(self, request: KeyedJaggedTensor) -> torch.Tensor:
        """Of this rank's shards, one after the other, flat."""
        empty = torch.empty(0, device=request.device())
        of_shards = {} if self.own is None else self.own(request)
        return torch.cat([empty, *(jagged.values().reshape(-1) for jagged in of_shards.values())])

    def _jagged(
        self, features: KeyedJaggedTensor, names: Sequence[str], vectors: Sequence[torch.Tensor]
    ) -> dict[str, JaggedTensor]:
        keys = [name for of in output_names(self._configs) for name in of]
        out = {}
        for key, name, vectors_ND in zip(keys, names, vectors, strict=True):
            ids = features[name]
            weights = ids.values() if self._need_indices else None
            out[key] = JaggedTensor(values=vectors_ND, weights=weights, lengths=ids.lengths())
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
