"""Quantized collections by TorchRec's names, each around one of `rayrec.quant`."""

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
    """What a module's `qconfig` asks for: each table's number format, and that of the output.

    Raises:
        ValueError: no `qconfig`, or a format for a table that there is not.
    """
    config: Any = getattr(module, "qconfig", None)
    if config is None:
        raise ValueError(
            f"{type(module).__name__} has no qconfig; set one, or call inference.modules.quantize_embeddings"
        )
    given: Mapping[str, torch.dtype] = getattr(config, "per_table_weight_dtype", None) or {}
    default = config.weight().dtype
    return {name: given.get(name, default) for name in tables}, config.activation().dtype


def _quantized(
    collection: quant.EmbeddingBagCollection | quant.EmbeddingCollection, configs: list[ConfigT]
) -> list[ConfigT]:
    """The configs with the number formats that the tables have now."""
    kinds = collection.formats()
    return [replace(config, data_type=DataType[kinds[config.name].name]) for config in configs]


def _made(collection: Any, kind: str) -> Any:
    if collection is None:
        raise NotOffered(f"a quantized {kind} is made of a trained one: use {kind}.from_float, or quantize_embeddings")
    return collection


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Pooled vectors from tables in few bits; `from_float` makes one. The state is one array of all tables' bytes.

    Args:
        collection: the quantized tables.
        output_dtype: of the vectors.

    Raises:
        NotOffered: no collection is given.
    """

    def __init__(
        self,
        *_: Any,
        collection: quant.EmbeddingBagCollection | None = None,
        output_dtype: torch.dtype = torch.float32,
        **__: Any,
    ) -> None:
        super().__init__()
        self.collection: quant.EmbeddingBagCollection = _made(collection, "EmbeddingBagCollection")
        self._output_dtype = output_dtype

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> EmbeddingBagCollection:
        """The tables of a `rayrec.torchrec.EmbeddingBagCollection`, in the formats that its `qconfig` asks for.

        Raises:
            ValueError: no `qconfig`, or numbers that do not fit a format.
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
    """A vector for every id, from tables in few bits; arguments as of `EmbeddingBagCollection`."""

    def __init__(
        self,
        *_: Any,
        collection: quant.EmbeddingCollection | None = None,
        output_dtype: torch.dtype = torch.float32,
        **__: Any,
    ) -> None:
        super().__init__()
        self.collection: quant.EmbeddingCollection = _made(collection, "EmbeddingCollection")
        self._output_dtype = output_dtype

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> EmbeddingCollection:
        """As `EmbeddingBagCollection.from_float`."""
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
                values=found.values().to(self._output_dtype),
                weights=found.weights_or_none(),
                lengths=found.lengths(),
            )
            for name, found in self.collection(features).items()
        }
