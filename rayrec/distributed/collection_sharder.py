"""What the sharders of both collections have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn

from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel import OptimizerSpec, check_trainable
from rayrec.distributed.sharding import collection
from rayrec.distributed.sharding.parameters import ShardedTable
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharder, ModuleSharding, ShardingEnv, ShardingType
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingCollection


class ShardedCollection(Protocol):
    """A collection's sharded twin."""

    def tables(self) -> dict[str, ShardedTable]: ...


M = TypeVar("M", bound=EmbeddingBagCollection | EmbeddingCollection)
S = TypeVar("S", bound=ShardedCollection)
Optimizers = Mapping[str, OptimizerSpec | None]


class CollectionSharder(ModuleSharder[M], Generic[M, S]):
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
        self.qcomm_codecs_registry = dict(qcomm_codecs_registry or {})
        self._codec = codec or next(iter(self.qcomm_codecs_registry.values()), None)
        self._dedup = dedup or bool(use_index_dedup)

    def shard(self, module: M, params: ModuleSharding, env: ShardingEnv, device: torch.device | None = None) -> S:  # type: ignore[override]
        """The sharded twin. A materialized module's weights are kept; on meta each shard is filled where it lies.

        Raises:
            ValueError: a table that `params` does not have, or the other way round; a kernel that there is not; a
                sharded table with both a dense kernel and an optimizer inside backward.
        """
        collection.check_plan(self._configs(module), params)
        weights = self.shardable_parameters(module)
        optimizers = collection.optimizers_of(params, weights, self.optimizer)
        device = device or collection.default_device()
        for config in self._configs(module):
            kernel = EmbeddingComputeKernel(params[config.name].compute_kernel)
            check_trainable(config, kernel, optimizers[config.name], device)
        sharded = self._twin(module, params, optimizers, env, device)
        collection.fill_tables(sharded.tables(), weights, module.seed, env)
        return sharded

    def sharding_types(self, compute_device: str) -> list[str]:
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device: str) -> list[str]:
        kernels = [EmbeddingComputeKernel.FUSED]
        if compute_device == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
        return [kernel.value for kernel in (*kernels, EmbeddingComputeKernel.DENSE)]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        tables = self._tables(module)
        return {config.name: cast(nn.Parameter, tables[config.name].weight) for config in self._configs(module)}

    @abstractmethod
    def _configs(self, module: M) -> Sequence[BaseEmbeddingConfig]: ...

    @abstractmethod
    def _tables(self, module: M) -> nn.ModuleDict: ...

    @abstractmethod
    def _twin(
        self, module: M, params: ModuleSharding, optimizers: Optimizers, env: ShardingEnv, device: torch.device
    ) -> S:
        """The sharded module, its tables' memory not yet filled."""
