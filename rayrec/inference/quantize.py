"""A model's collections in few bits, in place: for who scores in his own process, without an export."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rayrec import quant
from rayrec.inference.graph import collections_in, configs_of
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
        if not path:
            return made
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made)
    return model.eval()
