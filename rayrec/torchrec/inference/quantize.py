"""Quantizes the collections of a model in place, to score in this process without an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from rayrec import quant
from rayrec.inference import artifact
from rayrec.inference.graph import collections_in, configs_of, replace_collections, replace_module
from rayrec.modules import EmbeddingBagCollection
from rayrec.quant import TableFormat

Format = TableFormat | torch.dtype | str


def quantize_inference_model(
    model: nn.Module,
    per_table_weight_dtype: Mapping[str, Format] | None = None,
    fp_weight_dtype: Format = torch.int8,
) -> nn.Module:
    """Quantizes all embedding collections of a model in place; returns the model.

    Args:
        model: unsharded, with materialized tables.
        per_table_weight_dtype: formats of single tables, by name.
        fp_weight_dtype: format of all other tables.

    Raises:
        ValueError: a format for an unknown table, or a weight outside the range of its format; names table and row.
    """
    overrides = dict(per_table_weight_dtype or {})
    collections = collections_in(model)
    names = [config.name for module in collections.values() for config in configs_of(module)]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"per_table_weight_dtype: unknown table {unknown[0]!r}; the model has {names}")
    for path, module in collections.items():
        formats = {config.name: overrides.get(config.name, fp_weight_dtype) for config in configs_of(module)}
        quantized: nn.Module
        if isinstance(module, EmbeddingBagCollection):
            quantized = quant.EmbeddingBagCollection.from_float(module, formats)
        else:
            quantized = quant.EmbeddingCollection.from_float(module, formats)
        model = replace_module(model, path, quantized)
    return model.eval()


def read_exported_tables(model: nn.Module, folder: str | Path) -> nn.Module:
    """Replaces the collections of a model by quantized ones that read the tables of an export; returns the model.

    The file is memory-mapped, so the processes of a machine share it. The tables of the model may be on "meta".

    Raises:
        ExportError: the folder has no complete export.
        ValueError: the export lacks a table of the model, or has it with another size; names the table.
    """
    folder = Path(folder)
    index = artifact.read_index(folder)
    artifact.check_listed(folder, index.files, checksums=False)
    places = {place.table: place for place in index.places}
    for config in (config for module in collections_in(model).values() for config in configs_of(module)):
        table, size = places.get(config.name), (config.num_embeddings, config.embedding_dim)
        if table is None or (table.rows, table.dim) != size:
            exported = "lacks it" if table is None else f"has {(table.rows, table.dim)}"
            raise ValueError(f"table {config.name!r} has {size} (rows, dim) in the model, but {folder} {exported}")
    data = artifact.map_tables(folder / artifact.TABLES).data
    for slot in replace_collections(model, places):
        slot.instead = data
    return model.eval()
