"""Sharders with TorchRec's arguments, and the interface of planners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from rayrec.distributed.collections import embedding, embedding_bag
from rayrec.distributed.collections.sharder import kernels_of_tables
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.plan import module_sharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection

M = TypeVar("M", bound=nn.Module)


class ModuleSharder(module_sharder.ModuleSharder[M]):
    """Shards one kind of module.

    Args:
        qcomm_codecs_registry: number formats of communication, from `fbgemm_qcomm_codec`.
    """

    qcomm_codecs_registry: dict[str, Any] | None = None

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        self.qcomm_codecs_registry = None if qcomm_codecs_registry is None else dict(qcomm_codecs_registry)

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Returns the bytes of a table by memory: "hbm", or "ddr" on CPUs and for kernels with tables in host memory.

        Raises:
            ValueError: the device type is not "cuda" or "cpu".
        """
        if compute_device_type not in ("cuda", "cpu"):
            raise ValueError(f"compute_device_type={compute_device_type!r} must be 'cuda' or 'cpu'")
        host = compute_device_type == "cpu" or compute_kernel.startswith("fused_uvm")
        return {"ddr" if host else "hbm": tensor.numel() * tensor.element_size()}


class BaseEmbeddingSharder(ModuleSharder[M]):
    """Base class of custom sharders, which defines the possible sharding types and kernels.

    Args:
        fused_params: settings of the optimizer of the tables.
        qcomm_codecs_registry: number formats of communication, from `fbgemm_qcomm_codec`.
        sharded_module_order_overwrite: ignored; collections do not share exchanges.
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
        return kernels_of_tables(sharding_type, compute_device_type)


class ShardingPlanner(ABC):
    """Finds a sharding plan for a model."""

    @abstractmethod
    def plan(self, module: nn.Module, sharders: list[module_sharder.ModuleSharder[Any]]) -> ShardingPlan:
        """Returns the plan for `module`."""

    @abstractmethod
    def collective_plan(self, module: nn.Module, sharders: list[module_sharder.ModuleSharder[Any]]) -> ShardingPlan:
        """Plans on one rank and returns the plan on every rank."""


def _first(registry: Mapping[str, Codec] | None) -> Codec | None:
    """Returns the codec of a registry, which is the same for every exchange."""
    return next(iter((registry or {}).values()), None)


class EmbeddingBagCollectionSharder(embedding_bag.EmbeddingBagCollectionSharder, ModuleSharder[EmbeddingBagCollection]):
    """`rayrec.distributed.EmbeddingBagCollectionSharder` with TorchRec's arguments.

    Args:
        fused_params, codec, dedup: see rayrec's class; `use_index_dedup` is an alias of `dedup`.
        qcomm_codecs_registry: number formats of communication, from `fbgemm_qcomm_codec`, instead of `codec`.
        sharded_module_order_overwrite: ignored; collections do not share exchanges.
    """

    default_optimizer = OptimizerSpec()  # TorchRec trains tables without settings by SGD with a learning rate of 0.01

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Codec] | None = None,
        sharded_module_order_overwrite: Sequence[str] | None = None,
        *,
        use_index_dedup: bool = False,
        codec: Codec | None = None,
        dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, codec=codec or _first(qcomm_codecs_registry), dedup=dedup or use_index_dedup)
        ModuleSharder.__init__(self, qcomm_codecs_registry)


class EmbeddingCollectionSharder(embedding.EmbeddingCollectionSharder, ModuleSharder[EmbeddingCollection]):
    """`rayrec.distributed.EmbeddingCollectionSharder` with TorchRec's arguments.

    Args:
        fused_params, codec, dedup: see rayrec's class; `use_index_dedup` is an alias of `dedup`.
        qcomm_codecs_registry: number formats of communication, from `fbgemm_qcomm_codec`, instead of `codec`.
    """

    default_optimizer = OptimizerSpec()  # TorchRec trains tables without settings by SGD with a learning rate of 0.01

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Codec] | None = None,
        use_index_dedup: bool = False,
        *,
        codec: Codec | None = None,
        dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, codec=codec or _first(qcomm_codecs_registry), dedup=dedup or use_index_dedup)
        ModuleSharder.__init__(self, qcomm_codecs_registry)


def get_default_sharders() -> list[module_sharder.ModuleSharder[Any]]:
    """Returns one sharder per type of collection, with its default optimizer."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
