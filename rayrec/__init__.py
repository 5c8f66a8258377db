"""Training of recommendation models with sharded embedding tables on Ray: Parquet in, a trained model out.

Names are loaded on first use, so that `import rayrec` is cheap.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from rayrec._runtime.fbgemm_version import check_pair
from rayrec._runtime.imports import lazy_names

check_pair()

# Arrow's allocator reads this when pyarrow is loaded, and keeps freed pages. A stream frees a window's memory and
# allocates as much a moment later; returning the pages to the kernel makes an epoch up to a third longer.
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


_lazy_name = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"rayrec.{name}") if name in _PACKAGES else _lazy_name(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
