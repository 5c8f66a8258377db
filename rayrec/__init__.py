"""Training of recommendation models with sharded embedding tables: Parquet in, a trained model out, on Ray.

The names here are loaded when first used, so that `import rayrec` stays cheap.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from rayrec._runtime.fbgemm_version import check_pair
from rayrec._runtime.imports import lazy_names

check_pair()

# Read once, by Arrow's allocator, when pyarrow is loaded: it keeps the pages of what is freed. A stream gives back a
# window's memory, with windows mixed all of a block's, to ask for as much a moment later; with pages that went back to
# the kernel in between, an epoch takes up to a third longer.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

__version__ = "0.1.0"

_PACKAGES = frozenset(
    ["sparse", "optim", "modules", "models", "quant", "checkpoint", "data", "distributed", "metrics", "train"]
)

if TYPE_CHECKING:
    from rayrec._runtime.streamable import Multistreamable, Pipelineable
    from rayrec.models import Batch
    from rayrec.modules import (
        DataType,
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        PoolingType,
    )
    from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from rayrec.train import TrainConfig, Trainer

__all__ = [
    "Batch",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Multistreamable",
    "Pipelineable",
    "PoolingType",
    "TrainConfig",
    "Trainer",
]


_named = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"rayrec.{name}") if name in _PACKAGES else _named(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
