"""TorchRec's tree of public names over rayrec.

Change `torchrec` in your imports to `rayrec.torchrec`, or start the unchanged program with
`python -m rayrec.torchrec train.py`. `README.md` lists the differences.

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rayrec.torchrec import not_offered
from rayrec.torchrec.alias import install

not_offered.install()
_left_out = not_offered.names_left_out(__name__)

_HOMES = {
    "JaggedTensor": "rayrec.torchrec.sparse",
    "KeyedJaggedTensor": "rayrec.torchrec.sparse",
    "KeyedTensor": "rayrec.torchrec.sparse",
    "DataType": "rayrec.modules",
    "EmbeddingBagCollection": "rayrec.modules",
    "EmbeddingBagCollectionInterface": "rayrec.modules",
    "EmbeddingBagConfig": "rayrec.modules",
    "EmbeddingCollection": "rayrec.modules",
    "EmbeddingConfig": "rayrec.modules",
    "PoolingType": "rayrec.modules",
    "Multistreamable": "rayrec._runtime.streamable",
    "Pipelineable": "rayrec._runtime.streamable",
}
_PACKAGES = frozenset(
    ("datasets", "distributed", "fx", "inference", "metrics", "models", "modules", "optim", "quant", "sparse")
)

if TYPE_CHECKING:
    from rayrec._runtime.streamable import Multistreamable, Pipelineable
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

__version__ = "1.8.0"  # of TorchRec, whose names these are

__all__ = [
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
    "install",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    return _left_out(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
