"""A model's collections in few bits, in place: to score in the current process, without an export."""

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
    """Quantizes every embedding collection of a model; the model is changed and returned.

    Args:
        model: unsharded, its tables materialized.
        per_table_weight_dtype: format of single tables, by name.
        fp_weight_dtype: of all others.

    Raises:
        ValueError: a format for no table, or a number that a format cannot hold; names table and row.
    """
    given = dict(per_table_weight_dtype or {})
    found = collections_in(model)
    names = [config.name for module in found.values() for config in configs_of(module)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"per_table_weight_dtype names {unknown[0]!r}, which is no table; there are {names}")
    for path, module in found.items():
        made: nn.Module
        if isinstance(module, EmbeddingBagCollection):
            own = {c.name: given.get(c.name, fp_weight_dtype) for c in module.embedding_bag_configs()}
            made = quant.EmbeddingBagCollection.from_float(module, own)
        else:
            own = {c.name: given.get(c.name, fp_weight_dtype) for c in module.embedding_configs()}
            made = quant.EmbeddingCollection.from_float(module, own)
        model = replace_module(model, path, made)
    return model.eval()


def read_exported_tables(model: nn.Module, folder: str | Path) -> nn.Module:
    """Puts quantized collections that read an export's tables where they lie in the place of the model's own.

    The file is mapped: processes of a machine share it, and none needs to hold it. The model is changed and returned;
    its tables may be on "meta".

    Raises:
        ExportError: no whole export is there.
        ValueError: the export lacks one of the model's tables, or has it in another size; names the table.
    """
    folder = Path(folder)
    index = artifact.read_index(folder)
    artifact.check_listed(folder, index.files, checksums=False)
    places = {place.table: place for place in index.places}
    for config in (config for module in collections_in(model).values() for config in configs_of(module)):
        place, wanted = places.get(config.name), (config.num_embeddings, config.embedding_dim)
        if place is None or (place.rows, place.dim) != wanted:
            has = "does not have it" if place is None else f"has it as {(place.rows, place.dim)}"
            raise ValueError(f"table {config.name!r} is {wanted} (rows, dim) in the model, but {folder} {has}")
    data = artifact.map_tables(folder / artifact.TABLES).data
    for slot in replace_collections(model, places):
        slot.instead = data
    return model.eval()
