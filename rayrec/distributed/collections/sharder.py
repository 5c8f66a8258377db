"""The base class of both collections' sharders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.setup import Setup, ShardedExecutor
from rayrec.distributed.ids.routes import PlannedTable
from rayrec.distributed.kernel.choice import check_trainable
from rayrec.distributed.kernel.optimizer_spec import FROZEN, OptimizerSpec, optimizer_of
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType
from rayrec.distributed.replicas.gradients import same_weights, with_replicas
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.embedding import tables_of


class HasTables(Protocol):
    """A module with sharded tables."""

    without_optimizer: list[str]

    def tables(self) -> dict[str, ShardedTable]: ...


_NUMBERS = count(1)  # of the collections that this process shards
M = TypeVar("M", bound=EmbeddingBagCollection | EmbeddingCollection)
S = TypeVar("S", bound=HasTables)


class CollectionSharder(ModuleSharder[M], Generic[M, S]):
    """Shards a collection of tables of one kind.

    Args:
        fused_params: the tables' optimizer, as in `{"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.02}`.
            A table with `apply_optimizer_in_backward` keeps that optimizer. Without either, a table is not trained.
            Tables with a dense kernel need an optimizer of the user.
        by_table: per-table overrides of `fused_params`, by table name.
        codec: number formats of the vectors on the wire; float32 by default.
        dedup: whether an id that repeats in a feature of a rank's batch is sent and looked up once. Results do not
            change. "auto": in batches where that is faster; bags are never deduplicated. On GPUs "auto" is False,
            because the host finds the distinct ids, slower than a GPU looks all of them up; so is True on one GPU,
            which sends no ids.

    Raises:
        ValueError: an unknown setting in `fused_params`.
    """

    sharded_type: Callable[..., S]
    default_optimizer = FROZEN

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        *,
        by_table: Mapping[str, Mapping[str, Any]] | None = None,
        codec: Codec | None = None,
        dedup: bool | Literal["auto"] = False,
    ) -> None:
        self.fused_params = None if fused_params is None else dict(fused_params)
        chosen = fused_params is not None
        self.optimizer = OptimizerSpec.from_fused_params(fused_params) if chosen else self.default_optimizer
        self.by_table = {name: OptimizerSpec.from_fused_params(params) for name, params in (by_table or {}).items()}
        self.codec, self._dedup = codec, dedup

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return kernels_of_tables(sharding_type, compute_device_type)

    def shard(self, module: M, params: ModuleSharding, env: ShardingEnv, device: torch.device | None = None) -> S:  # type: ignore[override]
        """The sharded collection. It has the module's weights; on meta each rank initializes its own shards.

        Raises:
            ValueError: `params` and the module have different tables; an unknown kernel; a sharded table with both a
                dense kernel and an optimizer inside backward.
        """
        configs, _ = tables_of(module)
        check_plan(configs, params)
        number, seed = _agree(configs, module.seed, env)
        params = {c.name: params[c.name].of_table(c.name, c.num_embeddings, c.embedding_dim) for c in configs}
        weights = self.shardable_parameters(module)
        optimizers = with_replicas(optimizers_of(params, weights, self.optimizer, self.by_table), params, env)
        device = device or default_device()
        for config in configs:
            kernel = EmbeddingComputeKernel(params[config.name].compute_kernel)
            check_trainable(config, kernel, optimizers[config.name], device)
        context = RankContext.of(env, device)
        # Deduplication saves traffic, and on CPUs lookups. For GPUs the host finds the distinct ids.
        dedup = self._dedup
        if device.type == "cuda" and (context.world_size == 1 or dedup == "auto"):
            dedup = False
        setup = Setup(
            tables=tuple(PlannedTable(c, params[c.name], optimizers[c.name]) for c in configs),
            context=context,
            codec=self.codec or Codec(),
            weighted=isinstance(module, EmbeddingBagCollection) and module.is_weighted(),
            dedup=dedup,
        )
        copied, cut = ([t for t in setup.tables if t.sharding.replicated == kind] for kind in (True, False))
        replicated = ReplicatedExecutor(replace(setup, tables=tuple(copied))) if copied else None
        num_counts = 0 if replicated is None else len(replicated.groups)
        executor = self._executor(replace(setup, tables=tuple(cut)), num_counts)
        executor.exchange.identify(number, f"the collection of tables {[config.name for config in configs]}")
        sharded = self.sharded_type(module, setup, executor, replicated)
        fill_tables(sharded.tables(), weights, seed, env)
        frozen = [name for name, spec in optimizers.items() if spec is not None and spec.frozen]
        sharded.without_optimizer = [name for name in frozen if weights[name].requires_grad]
        return sharded

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        configs, tables = tables_of(module)
        return {config.name: cast(nn.Parameter, tables[config.name].weight) for config in configs}

    @abstractmethod
    def _executor(self, setup: Setup[Any], num_counts: int) -> ShardedExecutor:
        """The executor of sharded tables. `num_counts`: counts for the replicated tables in the headers of ids."""


def _agree(configs: Sequence[BaseEmbeddingConfig], seed: int, env: ShardingEnv) -> tuple[int, int]:
    """A number for the collection and its seed, equal on all ranks.

    Raises (on every rank):
        ValueError: ranks shard different collections at the same time.
    """
    tables = [(c.name, c.num_embeddings, c.embedding_dim, tuple(c.feature_names)) for c in configs]
    by_rank = comm.all_gather_object((next(_NUMBERS), seed, tables), env.whole.process_group)
    for rank, (_, _, others) in enumerate(by_rank):
        if others != by_rank[0][2]:
            names = [[table[0] for table in by_rank[number][2]] for number in (0, rank)]
            raise ValueError(
                f"rank 0 shards a collection of tables {names[0]}, rank {rank} one of tables {names[1]}, or with other "
                "rows, widths or features: every rank must build the same model in the same order (a set of strings "
                "has another order in each process)"
            )
    number, seed, _ = by_rank[0]
    return number, seed


def kernels_of_tables(sharding_type: str, compute_device_type: str) -> list[str]:
    """The kernels that support a sharding type on "cpu" or "cuda"."""
    kernels = [EmbeddingComputeKernel.FUSED]
    if compute_device_type == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
        kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
    return [kernel.value for kernel in (*kernels, EmbeddingComputeKernel.DENSE)]


def fill_tables(
    tables: Mapping[str, ShardedTable], weights: Mapping[str, torch.Tensor], seed: int, env: ShardingEnv
) -> None:
    """Initializes every local shard: with the materialized weights, or from the seed."""
    with torch.no_grad():
        for name, table in tables.items():
            weight = weights[name]
            table.seed = seed
            if weight.is_meta:
                table.reset_parameters()
                continue
            for item in table.local:
                rows, cols = item.shard.rows, item.shard.cols
                item.weight.copy_(weight[rows.start : rows.stop, cols.start : cols.stop])
                same_weights(item.weight, env)
            if table.replicated:
                comm.broadcast(table.local[0].weight, env.whole.process_group)


def optimizers_of(
    params: ModuleSharding,
    weights: Mapping[str, torch.Tensor],
    default: OptimizerSpec,
    by_table: Mapping[str, OptimizerSpec],
) -> dict[str, OptimizerSpec | None]:
    """Each table's optimizer inside backward; None for a dense kernel, `FROZEN` without `requires_grad`.

    A data-parallel table with a dense kernel is left to the dense optimizer, like all replicated parameters, even with
    `apply_optimizer_in_backward`: programs apply that to all tables.

    Raises:
        ValueError: a sharded table with a dense kernel and an optimizer inside backward.
    """
    optimizers: dict[str, OptimizerSpec | None] = {}
    for name, weight in weights.items():
        dense = EmbeddingComputeKernel(params[name].compute_kernel) is EmbeddingComputeKernel.DENSE
        in_backward = bool(getattr(weight, "_optimizer_classes", None))
        if dense and in_backward and not params[name].replicated:
            raise ValueError(
                f"table {name!r}: its kernel is dense, which leaves gradients to your optimizer, but "
                "apply_optimizer_in_backward set an optimizer inside backward; remove one of the two"
            )
        spec = optimizer_of(weight, by_table.get(name, default))
        optimizers[name] = None if dense and weight.requires_grad else _rounded(spec, params[name].stochastic_rounding)
    return optimizers


def _rounded(spec: OptimizerSpec, stochastic: bool | None) -> OptimizerSpec:
    """The settings with the plan's rounding mode, if it sets one."""
    return spec if stochastic is None else replace(spec, stochastic_rounding=stochastic)


def check_plan(configs: Sequence[BaseEmbeddingConfig], params: ModuleSharding) -> None:
    """Raises ValueError if plan and collection have different tables, or a kernel is unknown."""
    mismatch = {config.name for config in configs} ^ set(params)
    if mismatch:
        raise ValueError(f"plan and collection differ in table {min(mismatch)!r}; plan again for this model")
    for name, sharding in params.items():
        try:
            EmbeddingComputeKernel(sharding.compute_kernel)
        except ValueError:
            kernels = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
            raise ValueError(
                f"table {name!r}: unknown compute kernel {sharding.compute_kernel!r}; use one of {kernels}"
            ) from None


def default_device() -> torch.device:
    """This process's GPU, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
