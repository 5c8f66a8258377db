"""The sharded embedding bag collection and its sharder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable, NoWait
from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.fused_optimizer import EmbeddingFusedOptimizer
from rayrec.distributed.kernel import Kernel, OptimizerSpec
from rayrec.distributed.sharding.flat import FlatExecutor
from rayrec.distributed.sharding.id_check import IdCheck
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.parameters import LocalShard, ShardedTable
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.replicated import ReplicatedExecutor, ReplicatedIds
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharder, ModuleSharding, Shard, ShardingEnv, ShardingType, Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, init
from rayrec.modules.embedding import output_names
from rayrec.optim import CombinedOptimizer
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


@dataclass(frozen=True)
class BagIds:
    """A batch after `input_dist`: what this rank looks up for everyone, and for itself."""

    kjt: KeyedJaggedTensor
    routed: RoutedIds
    replicated: ReplicatedIds | None


@dataclass(frozen=True)
class Bags:
    """A batch after `lookup`: sums for the global batch, and finished vectors of replicated tables."""

    ids: BagIds
    pooled: torch.Tensor
    replicated: list[torch.Tensor]


class ShardedEmbeddingBagCollection(nn.Module):
    """The twin of an `EmbeddingBagCollection` whose tables lie on many ranks: same input, same output, waited for.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward.

    Args:
        tables: of the unsharded collection.
        params: each table's sharding.
        optimizers: each table's update.
        env, device: where this process stands.
        weighted: ids carry weights.
        codec: number formats of the pooled vectors on the wire.

    Raises:
        ValueError: shards that do not cover a table, or lie outside the world.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        params: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec],
        env: ShardingEnv,
        device: torch.device,
        weighted: bool = False,
        codec: Codec | None = None,
    ) -> None:
        super().__init__()
        self._place = place = Place.of(env, device)
        self._configs = tuple(tables)
        replicated = [table for table in tables if params[table.name].replicated]
        sharded = [table for table in tables if not params[table.name].replicated]
        self._replicated = ReplicatedExecutor(replicated, optimizers, place, weighted) if replicated else None
        num_groups = self._replicated.num_groups if self._replicated else 0
        self._flat = FlatExecutor(sharded, params, optimizers, place, weighted, num_groups, codec or Codec())
        self._check = IdCheck(tables, weighted)
        self._names = [name for names in output_names(tables) for name in names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._merge = _merge_order(tables, params, self._replicated)
        self.embedding_bags = nn.ModuleDict(self._tables())
        self._optimizer = CombinedOptimizer(self._fused_optimizers())

    # -- a step

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[BagIds]:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        features, problem = _whole_batch(features)
        problem = problem or self._check.problem(features)
        kjt = features if problem is None else self._check.nothing(features)
        replicated = self._replicated.input_dist(kjt) if self._replicated else None
        routed = self._flat.input_dist(kjt, replicated.counts if replicated else None, problem)
        return Deferred(lambda: BagIds(kjt, routed.wait(), replicated))

    def lookup(self, ids: BagIds) -> Bags:
        """Looks up this rank's rows for the global batch, and replicated tables for its own."""
        vectors: list[torch.Tensor] = []
        if self._replicated is not None and ids.replicated is not None:
            vectors = self._replicated.lookup(ids.replicated, ids.routed.row_counts, ids.kjt)
        return Bags(ids, self._flat.lookup(ids.routed), vectors)

    def output_dist(self, bags: Bags) -> LazyAwaitable[KeyedTensor]:
        """Sends every example's vectors back to its rank."""
        if not self._flat.routes.outputs:
            return NoWait(self._keyed(torch.empty(0), bags.replicated))
        vectors = self._flat.output_dist(bags.pooled, bags.ids.routed.batch_sizes, bags.ids.kjt)
        return EmbeddingBagCollectionAwaitable(lambda: self._keyed(vectors.wait(), bags.replicated))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pooled vectors `[B, sum of dims]` of this rank's B examples, in the unsharded order, to be waited for."""
        return self.output_dist(self.lookup(self.input_dist(features).wait()))

    def _keyed(self, flat: torch.Tensor, replicated: list[torch.Tensor]) -> KeyedTensor:
        if not replicated:
            return KeyedTensor(self._names, self._dims, flat)
        pieces = [
            flat[:, piece.start : piece.stop] if isinstance(piece, Span) else replicated[piece] for piece in self._merge
        ]
        return KeyedTensor(self._names, self._dims, torch.cat(pieces, dim=1))

    # -- what is trained

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that runs inside backward."""
        return self._optimizer

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def tables(self) -> dict[str, ShardedTable]:
        """Each table's shards by name."""
        return {name: table for name, table in self.embedding_bags.items() if isinstance(table, ShardedTable)}

    def kernels(self) -> list[Kernel]:
        """This rank's kernels: those of sharded tables, then those of replicated ones."""
        replicated: list[Kernel] = list(self._replicated.kernels) if self._replicated else []
        return [*self._flat.kernels.values(), *replicated]

    def _tables(self) -> dict[str, nn.Module]:
        rank = self._place.rank
        local: dict[str, list[LocalShard]] = {config.name: [] for config in self._configs}
        for kernel in self.kernels():
            for table, weight, state in zip(kernel.tables, kernel.weights(), kernel.states(), strict=True):
                shard = Shard(table=table.config.name, rows=table.rows, cols=table.cols, rank=rank)
                local[shard.table].append(LocalShard(shard, weight, state))
        everywhere: dict[str, list[Shard]] = {config.name: [] for config in self._configs}
        for number, route in enumerate(self._flat.routes.ranks):
            for held in route.tables.values():
                for table in held:
                    shard = Shard(table=table.config.name, rows=table.rows, cols=table.cols, rank=number)
                    everywhere[shard.table].append(shard)
        return {
            config.name: ShardedTable(config, everywhere[config.name], local[config.name], self._place)
            for config in self._configs
        }

    def _fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """One a kernel; a kernel's tables and a table's local shards come in the same order."""
        used = dict.fromkeys(self.embedding_bags, 0)
        optimizers = []
        for kernel in self.kernels():
            names, params = [], []
            for table in kernel.tables:
                name = table.config.name
                attribute = f"weight_{used[name]}" if used[name] else "weight"
                names.append(f"embedding_bags.{name}.{attribute}")
                params.append(getattr(self.embedding_bags[name], attribute))
                used[name] += 1
            optimizers.append(EmbeddingFusedOptimizer(kernel, names, params))
        return optimizers

    # -- the stages by the tutorials' names

    def _executors(self) -> list[Any]:
        return [executor for executor in (self._flat, self._replicated) if executor is not None]

    def extra_repr(self) -> str:
        stages = [f"(executors): {self._executors()}", f"(lookups): {self.kernels()}"]
        return "\n".join(stages)

    @property
    def _input_dists(self) -> list[Any]:
        return self._executors()

    @property
    def _lookups(self) -> list[Any]:
        return self.kernels()

    @property
    def _output_dists(self) -> list[Any]:
        return self._executors()


def _whole_batch(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, ValueError | None]:
    """The batch with the lists of every example, where it came with a batch size that varies by key."""
    try:
        return features.expanded(), None
    except ValueError as error:
        return features, error


class EmbeddingBagCollectionAwaitable(Deferred[KeyedTensor]):
    """Pooled vectors on their way."""


def _merge_order(
    tables: Sequence[EmbeddingBagConfig], params: ModuleSharding, replicated: ReplicatedExecutor | None
) -> list[Span | int]:
    """The result's blocks in order: columns of the flat executor's result, or places among the replicated vectors."""
    places = {(table, f): n for n, (table, f, _) in enumerate(replicated.outputs)} if replicated else {}
    order: list[Span | int] = []
    col = 0
    for table in tables:
        for feature in table.feature_names:
            if params[table.name].replicated:
                order.append(places[(table.name, feature)])
                continue
            last = order[-1] if order else None
            start = last.start if isinstance(last, Span) else col
            col += table.embedding_dim
            if isinstance(last, Span):
                order[-1] = Span(start, col)
            else:
                order.append(Span(start, col))
    return order


class EmbeddingBagCollectionSharder(ModuleSharder[EmbeddingBagCollection]):
    """Shards an `EmbeddingBagCollection`.

    Args:
        fused_params: the tables' optimizer, as in `{"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.02}`;
            SGD with learning rate 0.01 by default. A table that went through `apply_optimizer_in_backward` keeps the
            optimizer from there.
        codec: number formats of the pooled vectors on the wire.

    Raises:
        ValueError: an unknown setting in `fused_params`.
    """

    module_type = EmbeddingBagCollection

    def __init__(self, fused_params: Mapping[str, Any] | None = None, codec: Codec | None = None) -> None:
        self.optimizer = OptimizerSpec.from_fused_params(fused_params)
        self._codec = codec

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: ModuleSharding,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """The sharded twin. A materialized module's weights are kept; on meta each shard is filled where it lies.

        Raises:
            ValueError: a table that `params` does not have, or the other way round.
        """
        configs = module.embedding_bag_configs()
        unlike = {config.name for config in configs} ^ set(params)
        if unlike:
            raise ValueError(f"plan and collection differ in table {min(unlike)!r}; plan again for this model")
        device = device or default_device()
        weights = self.shardable_parameters(module)
        optimizers = {config.name: optimizer_of(weights[config.name], self.optimizer) for config in configs}
        sharded = ShardedEmbeddingBagCollection(
            configs, params, optimizers, env, device, module.is_weighted(), self._codec
        )
        fill_tables(sharded.tables(), weights, module.seed, env)
        return sharded

    def sharding_types(self, compute_device: str) -> list[str]:
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device: str) -> list[str]:
        kernels = [EmbeddingComputeKernel.FUSED]
        if compute_device == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
        return [kernel.value for kernel in kernels]

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        return {name: cast(nn.Parameter, table.weight) for name, table in module.embedding_bags.items()}


def default_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def optimizer_of(weight: torch.Tensor, default: OptimizerSpec) -> OptimizerSpec:
    """The optimizer that `apply_optimizer_in_backward` left on a table's weight, else the default."""
    classes = getattr(weight, "_optimizer_classes", None)
    if not classes:
        return default
    return OptimizerSpec.from_torch(classes[-1], weight._optimizer_kwargs[-1])  # type: ignore[attr-defined]


def fill_tables(
    tables: Mapping[str, ShardedTable], weights: Mapping[str, torch.Tensor], seed: int, env: ShardingEnv
) -> None:
    """Gives every local shard its first weights: the materialized ones, or those that rank 0's seed decides."""
    seed = comm.broadcast_object(seed, env.process_group)
    with torch.no_grad():
        for name, table in tables.items():
            weight = weights[name]
            for item in table.local:
                rows, cols = item.shard.rows, item.shard.cols
                if weight.is_meta:
                    init.fill(item.weight, table.config, seed, (rows.start, rows.stop), (cols.start, cols.stop))
                else:
                    item.weight.copy_(weight[rows.start : rows.stop, cols.start : cols.stop])
            if table.replicated and not weight.is_meta:
                comm.broadcast(table.local[0].weight, env.process_group)
