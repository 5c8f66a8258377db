"""Quantizes the collections of a model, to score in this process. For a service, use `rayrec export`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver

from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.torchrec.modules.embedding_configs import QuantConfig
from rayrec.torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from rayrec.torchrec.not_offered import NotOffered, names_left_out
from rayrec.torchrec.quant import embedding_modules as quant

__getattr__ = names_left_out(__name__)

Mapped = Mapping[type[nn.Module], Any]
BAGS: Mapped = {EmbeddingBagCollection: quant.EmbeddingBagCollection}
ALL: Mapped = {**BAGS, EmbeddingCollection: quant.EmbeddingCollection}


def _replaced(module: nn.Module, mapping: Mapped, config: QuantConfig, within_fp: QuantConfig) -> nn.Module:
    quantized_type = mapping.get(type(module))
    if quantized_type is not None:
        module.qconfig = config  # type: ignore[assignment]
        quantized: nn.Module = quantized_type.from_float(module)
        return quantized
    for name, child in module.named_children():
        child_config = within_fp if isinstance(module, FeatureProcessedEmbeddingBagCollection) else config
        setattr(module, name, _replaced(child, mapping, child_config, within_fp))
    return module


def _config(dtype: torch.dtype, output: torch.dtype, by_table: dict[str, torch.dtype] | None) -> QuantConfig:
    return QuantConfig(
        PlaceholderObserver.with_args(dtype=output), PlaceholderObserver.with_args(dtype=dtype), by_table
    )


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapped | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Quantizes the EmbeddingBagCollections of a model, and the other types in `additional_mapping`.

    Args:
        module: unsharded, with materialized tables.
        dtype: format of the tables: qint8, int8, quint4x2, float16 or float32.
        inplace: modify the model instead of a copy.
        additional_qconfig_spec_keys: other types; `additional_mapping` needs an entry for each.
        additional_mapping: by type, the class with a `from_float` that quantizes it.
        output_dtype: dtype of the vectors.
        per_table_weight_dtype: formats of single tables, by name.

    Raises:
        ValueError: a type without entry, an unknown format, or weights outside the range of the format.
    """
    mapping = {**BAGS, **(additional_mapping or {})}
    missing = [kind.__name__ for kind in additional_qconfig_spec_keys or () if kind not in mapping]
    if missing:
        raise ValueError(f"additional_mapping has no entry for {missing[0]}, which additional_qconfig_spec_keys names")
    config = _config(dtype, output_dtype, per_table_weight_dtype)
    return _replaced(module if inplace else copy.deepcopy(module), mapping, config, config)


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, Any] | None = None,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Quantizes all embedding collections of a model in place; returns the model.

    Args:
        model: unsharded, with materialized tables.
        quantization_mapping: not supported; must be None.
        per_table_weight_dtype: formats of single tables, by name.
        fp_weight_dtype: format of tables behind a feature processor.
        quantization_dtype: format of all other tables.
        output_dtype: dtype of the vectors.

    Raises:
        NotOffered: `quantization_mapping`.
        ValueError: an unknown format, or weights outside the range of the format.
    """
    if quantization_mapping is not None:
        raise NotOffered("quantization_mapping: leave it out, or call quantize_embeddings with additional_mapping")
    config = _config(quantization_dtype, output_dtype, per_table_weight_dtype)
    within_fp = _config(fp_weight_dtype, output_dtype, per_table_weight_dtype)
    return _replaced(model, ALL, config, within_fp)


def shard_quant_model(*args: Any, **kwargs: Any) -> None:
    """Not supported; raises NotOffered. In rayrec, a process uses a single device."""
    raise NotOffered(
        "shard_quant_model: use rayrec.torchrec.inference.shard_quant_model(model, group) with one process per device; "
        "`rayrec serve` starts them"
    )
