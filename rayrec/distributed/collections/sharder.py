"""What the sharders of both collections have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.comm.place import Place
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.executors.setup import PlannedTable, Setup
from rayrec.distributed.kernel import OptimizerSpec, check_trainable
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType
from rayrec.distributed.replicas.gradients import same_weights, with_replicas
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingCollection


class ShardedCollection(Protocol):
    """A collection's sharded twin."""

    def tables(self) -> dict[str, ShardedTable]: ...


B = TypeVar("B", bound=nn.Module)
M = TypeVar("M", bound=EmbeddingBagCollection | EmbeddingCollection)
S = TypeVar("S", bound=ShardedCollection)


class BaseEmbeddingSharder(ModuleSharder[B]):
    """A base for sharders of one's own: settings of the tables' optimizer, and what can run.

    Args:
        fused_params, qcomm_codecs_registry: as of `CollectionSharder`.
        sharded_module_order_overwrite: taken and not needed: collections share no exchange.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        sharded_module_order_overwrite: Sequence[str] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self.fused_params = None if fused_params is None else dict(fused_params)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        kernels = [EmbeddingComputeKernel.FUSED]
        if compute_device_type == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
        return [kernel.value for kernel in (*kernels, EmbeddingComputeKernel.DENSE)]


class CollectionSharder(BaseEmbeddingSharder[M], Generic[M, S]):
    """Shards a collection of tables of one kind.

    Args:
        fused_params: the tables' optimizer, as in `{"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.02}`;
            SGD with learning rate 0.01 by default. A table that went through `apply_optimizer_in_backward` keeps the
            optimizer from there. Tables with a dense kernel are left to an optimizer of the user's.
        codec: number formats of the vectors on the wire; or as `qcomm_codecs_registry`, of `fbgemm_qcomm_codec`.
        dedup: an id that comes several times in a feature of a rank's batch is sent and looked up once; results are the
            same. `use_index_dedup` is another name of it.

    Raises:
        ValueError: an unknown setting in `fused_params`.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Codec] | None = None,
        use_index_dedup: bool = False,
        *,
        codec: Codec | None = None,
        dedup: bool = False,
    ) -> None:
        self.optimizer = OptimizerSpec.from_fused_params(fused_params)
        super().__init__(fused_params, qcomm_codecs_registry)
        self._codec = codec or next(iter((qcomm_codecs_registry or {}).values()), None)
        self._dedup = dedup or bool(use_index_dedup)

    def shard(self, module: M, params: ModuleSharding, env: ShardingEnv, device: torch.device | None = None) -> S:  # type: ignore[override]
        """The sharded twin. A materialized module's weights are kept; on meta each shard is filled where it lies.

        Raises:
            ValueError: a table that `params` does not have, or the other way round; a kernel that there is not; a
                sharded table with both a dense kernel and an optimizer inside backward.
        """
        configs = self._configs(module)
        check_plan(configs, params)
        params = {c.name: params[c.name].of_table(c.name, c.num_embeddings, c.embedding_dim) for c in configs}
        weights = self.shardable_parameters(module)
        optimizers = with_replicas(optimizers_of(params, weights, self.optimizer), params, env)
        device = device or default_device()
        for config in configs:
            kernel = EmbeddingComputeKernel(params[config.name].compute_kernel)
            check_trainable(config, kernel, optimizers[config.name], device)
        setup = Setup(
            tables=tuple(PlannedTable(c, params[c.name], optimizers[c.name]) for c in configs),
            place=Place.of(env, device),
            codec=self._codec or Codec(),
            weighted=isinstance(module, EmbeddingBagCollection) and module.is_weighted(),
            dedup=self._dedup,
        )
        sharded = self._twin(module, setup)
        fill_tables(sharded.tables(), weights, module.seed, env)
        return sharded

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        tables = self._tables(module)
        return {config.name: cast(nn.Parameter, tables[config.name].weight) for config in self._configs(module)}

    @property
    def codec(self) -> Codec | None:
        """Number formats of the vectors on the wire; None for float32."""
        return self._codec

    @abstractmethod
    def _configs(self, module: M) -> Sequence[BaseEmbeddingConfig]: ...

    @abstractmethod
    def _tables(self, module: M) -> nn.ModuleDict: ...

    @abstractmethod
    def _twin(self, module: M, setup: Setup[Any]) -> S:
        """The sharded module, its tables' memory not yet filled."""


def fill_tables(
    tables: Mapping[str, ShardedTable], weights: Mapping[str, torch.Tensor], seed: int, env: ShardingEnv
) -> None:
    """Gives every local shard its first weights: the materialized ones, or those that rank 0's seed decides."""
    seed = comm.broadcast_object(seed, env.whole.process_group)
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
    params: ModuleSharding, weights: Mapping[str, torch.Tensor], default: OptimizerSpec
) -> dict[str, OptimizerSpec | None]:
    """Each table's update inside backward; None for one whose kernel is dense.

    A data-parallel table that went through `apply_optimizer_in_backward` keeps the optimizer from there even where its
    kernel is dense: TorchRec's plans know no other kernel for it.

    Raises:
        ValueError: a sharded table with a dense kernel and an optimizer inside backward.
    """
    optimizers: dict[str, OptimizerSpec | None] = {}
    for name, weight in weights.items():
        dense = EmbeddingComputeKernel(params[name].compute_kernel) is EmbeddingComputeKernel.DENSE
        given = bool(getattr(weight, "_optimizer_classes", None))
        if dense and given and not params[name].replicated:
            raise ValueError(
                f"table {name!r}: its kernel is dense, which leaves gradients to an optimizer of yours, but "
                "apply_optimizer_in_backward gave it one that runs inside backward; take back one of the two"
            )
        optimizers[name] = None if dense and not given else optimizer_of(weight, default)
    return optimizers


def optimizer_of(weight: torch.Tensor, default: OptimizerSpec) -> OptimizerSpec:
    """The optimizer that `apply_optimizer_in_backward` left on a table's weight, else the default."""
    classes = getattr(weight, "_optimizer_classes", None)
    if not classes:
        return default
    return OptimizerSpec.from_torch(classes[-1], weight._optimizer_kwargs[-1])  # type: ignore[attr-defined]


def check_plan(configs: Sequence[BaseEmbeddingConfig], params: ModuleSharding) -> None:
    """Raises ValueError for a table that the plan does not have, or the other way round, and for an unknown kernel."""
    unlike = {config.name for config in configs} ^ set(params)
    if unlike:
        raise ValueError(f"plan and collection differ in table {min(unlike)!r}; plan again for this model")
    for name, sharding in params.items():
        try:
            EmbeddingComputeKernel(sharding.compute_kernel)
        except ValueError:
            known = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
            raise ValueError(
                f"table {name!r}: there is no compute kernel {sharding.compute_kernel!r}; there are {known}"
            ) from None


def default_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
