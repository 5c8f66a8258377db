"""An FX tracer that keeps unsharded and sharded embedding collections as single nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from rayrec import quant
from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.modules.embedding import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from rayrec.torchrec.distributed.sharded_module import ShardedModule
from rayrec.torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from rayrec.torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from rayrec.torchrec.modules.mc_modules import ManagedCollisionCollection

LEAF_MODULES = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ShardedCollection,
    ShardedModule,
    quant.EmbeddingBagCollection,
    quant.EmbeddingCollection,
)

_depth = 0  # number of active traces


def is_fx_tracing() -> bool:
    """Whether a `Tracer` of this module is tracing."""
    return _depth > 0


class Tracer(fx.Tracer):
    """`torch.fx.Tracer` for models with embedding collections: each is one call_module node.

    Args:
        leaf_modules: names of other module classes that become one node.
    """

    def __init__(self, leaf_modules: Sequence[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = frozenset(leaf_modules or ())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf = isinstance(m, LEAF_MODULES) or type(m).__name__ in self._leaf_modules
        return is_leaf or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Returns the graph of a module or function.

        Raises:
            ValueError: `root` is a DistributedModelParallel; a graph cannot contain its gradient exchange.
        """
        if isinstance(root, DistributedModelParallel):
            raise ValueError("trace model.module: a graph cannot contain DistributedModelParallel's gradient exchange")
        global _depth
        _depth += 1
        try:
            return super().trace(root, concrete_args)
        finally:
            _depth -= 1


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: Sequence[str] | None = None,
) -> fx.GraphModule:
    """Returns the traced graph module of `root`, with embedding collections as single nodes.

    Args:
        root: a module or function.
        concrete_args: arguments that are constants of the graph.
        leaf_modules: see `Tracer`.

    Raises:
        ValueError: see `Tracer.trace`.
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    return fx.GraphModule(tracer.root, graph)
