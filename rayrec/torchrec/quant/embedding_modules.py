"""Quantized collections with TorchRec's names; each wraps one of `rayrec.quant`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from rayrec import quant
from rayrec.modules import DataType, EmbeddingBagConfig, EmbeddingConfig
from rayrec.modules.embedding import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    output_names,
)
from rayrec.torchrec.not_offered import NotOffered, names_left_out
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__getattr__ = names_left_out(__name__)

ConfigT = TypeVar("ConfigT", EmbeddingBagConfig, EmbeddingConfig)


def formats(module: nn.Module, tables: list[str]) -> tuple[dict[str, torch.dtype], torch.dtype]:
    """Returns the formats in the `qconfig` of a module: the dtype of each table, and the output dtype.

    Raises:
        ValueError: no `qconfig`.
    """
    config: Any = getattr(module, "qconfig", None)
    if config is None:
        raise ValueError(
            f"{type(module).__name__} has no qconfig; set one, or call inference.modules.quantize_embeddings"
        )
    overrides: Mapping[str, torch.dtype] = getattr(config, "per_table_weight_dtype", None) or {}
    default = config.weight().dtype
    return {name: overrides.get(name, default) for name in tables}, config.activation().dtype


def _quantized(
    collection: quant.EmbeddingBagCollection | quant.EmbeddingCollection, configs: list[ConfigT]
) -> list[ConfigT]:
    """Returns the configs with the formats of the quantized tables."""
    kinds = collection.formats()
    return [replace(config, data_type=DataType[kinds[config.name].name]) for config in configs]


def _required(collection: Any, kind: str) -> Any:
    if collection is None:
        raise NotOffered(f"create a quantized {kind} from a trained one, with {kind}.from_float or quantize_embeddings")
    return collection


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Pooled vectors from quantized tables; create it with `from_float`. The state is one array of the bytes of all
    tables.

    Args:
        collection: the quantized tables.
        output_dtype: dtype of the vectors.

    Raises:
        NotOffered: `collection` is None.
    """

    def __init__(
        self,
        *_: Any,
        collection: quant.EmbeddingBagCollection | None = None,
        output_dtype: torch.dtype = torch.float32,
        **__: Any,
    ) -> None:
        super().__init__()
        self.collection: quant.EmbeddingBagCollection = _required(collection, "EmbeddingBagCollection")
        self._output_dtype = output_dtype

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> EmbeddingBagCollection:
        """Quantizes an EmbeddingBagCollection to the formats in its `qconfig`.

        Raises:
            ValueError: no `qconfig`, or weights outside the range of a format.
        """
        kinds, output = formats(module, [config.name for config in module.embedding_bag_configs()])
        return cls(collection=quant.EmbeddingBagCollection.from_float(module, kinds), output_dtype=output)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return _quantized(self.collection, self.collection.embedding_bag_configs())

    def is_weighted(self) -> bool:
        return self.collection.is_weighted()

    def output_dtype(self) -> torch.dtype:
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        return self.collection.device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = self.collection(features)
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values().to(self._output_dtype))


class EmbeddingCollection(EmbeddingCollectionInterface):
    """A vector per id from quantized tables; has the arguments of `EmbeddingBagCollection`."""

    def __init__(
        self,
        *_: Any,
        collection: quant.EmbeddingCollection | None = None,
        output_dtype: torch.dtype = torch.float32,
        **__: Any,
    ) -> None:
        super().__init__()
        self.collection: quant.EmbeddingCollection = _required(collection, "EmbeddingCollection")
        self._output_dtype = output_dtype

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> EmbeddingCollection:
        """See `EmbeddingBagCollection.from_float`."""
        kinds, output = formats(module, [config.name for config in module.embedding_configs()])
        return cls(collection=quant.EmbeddingCollection.from_float(module, kinds), output_dtype=output)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return _quantized(self.collection, self.collection.embedding_configs())

    def embedding_dim(self) -> int:
        return self.collection.embedding_dim()

    def need_indices(self) -> bool:
        return self.collection.need_indices()

    def embedding_names_by_table(self) -> list[list[str]]:
        return output_names(self.embedding_configs())

    def output_dtype(self) -> torch.dtype:
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        return self.collection.device

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(
                values=vectors.values().to(self._output_dtype),
                weights=vectors.weights_or_none(),
                lengths=vectors.lengths(),
            )
            for name, vectors in self.collection(features).items()
        }
