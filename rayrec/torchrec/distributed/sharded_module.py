"""Base class of custom sharded modules, with the stages input_dist, compute and output_dist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rayrec._runtime.streamable import Multistreamable
from rayrec.distributed.collections.fused_optimizer import EmbeddingFusedOptimizer
from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.comm.awaitable import Awaitable, LazyAwaitable
from rayrec.torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule

Ids = TypeVar("Ids")
Vectors = TypeVar("Vectors")
Out = TypeVar("Out")
Context = TypeVar("Context", bound=Multistreamable)


class ShardedModule(nn.Module, ABC, Generic[Ids, Vectors, Out, Context]):
    """A module with parameters on several ranks.

    rayrec's sharded collections are registered as subclasses; they keep the state of a step with its ids instead of in
    a context.

    Args:
        qcomm_codecs_registry: number formats of communication, by exchange.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._codecs = {} if qcomm_codecs_registry is None else qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> dict[str, Any]:
        return self._codecs

    @abstractmethod
    def create_context(self) -> Context:
        """Creates the state of one step, which is passed to its stages."""

    @abstractmethod
    def input_dist(self, ctx: Context, *inputs: Any, **kwargs: Any) -> Awaitable[Awaitable[Ids]]:
        """Sends sizes, then ids."""

    @abstractmethod
    def compute(self, ctx: Context, dist_input: Ids) -> Vectors:
        """Looks up the vectors."""

    @abstractmethod
    def output_dist(self, ctx: Context, output: Vectors) -> LazyAwaitable[Out]:
        """Sends vectors back."""

    def compute_and_output_dist(self, ctx: Context, input: Ids) -> LazyAwaitable[Out]:
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *inputs: Any, **kwargs: Any) -> LazyAwaitable[Out]:
        """Runs all stages in order."""
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, *inputs, **kwargs).wait().wait())

    def prefetch(
        self, dist_input: Ids, forward_stream: torch.cuda.Stream | None = None, ctx: Context | None = None
    ) -> None:
        """Does nothing by default; the lookup fetches rows into a device cache."""

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names of the parameters that DistributedDataParallel must ignore."""
        for name, _ in self.named_parameters():
            yield f"{prefix}.{name}" if prefix else name

    @property
    @abstractmethod
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the unsharded module."""


class ShardedEmbeddingModule(ShardedModule[Ids, Vectors, Out, Context], FusedOptimizerModule):
    """A sharded module of embeddings, with an optimizer in the backward pass."""


ShardedEmbeddingModule.register(ShardedCollection)  # type: ignore[type-abstract]
FusedOptimizer.register(EmbeddingFusedOptimizer)
