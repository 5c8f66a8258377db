"""Unsharded collections with an optimizer in the backward pass (`apply_optimizer_in_backward`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rayrec.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim.in_backward import apply_optimizer_in_backward
from rayrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

Optimizer = type[torch.optim.Optimizer]


class FusedEmbeddingBagCollection(EmbeddingBagCollection):
    """An `EmbeddingBagCollection` that updates its tables in the backward pass, and frees their gradients.

    Args:
        tables, is_weighted, device: see `EmbeddingBagCollection`.
        optimizer_type: torch's SGD, Adagrad or Adam, or a row-wise optimizer of `rayrec.torchrec.optim`.
        optimizer_kwargs: settings of the optimizer, for example `{"lr": 0.02}`.
        location: ignored; the sharding plan defines the memory.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: Optimizer,
        optimizer_kwargs: Mapping[str, Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        location: object = None,
    ) -> None:
        super().__init__(tables, is_weighted, device)
        self._optimizer = (optimizer_type, dict(optimizer_kwargs))
        apply_optimizer_in_backward(optimizer_type, self.parameters(), dict(optimizer_kwargs))

    def optimizer_type(self) -> Optimizer:
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        return self._optimizer[1]

    def fused_optimizer(self) -> KeyedOptimizer:
        """Returns the optimizers of the tables, with one parameter group each."""
        return _optimizers(self.embedding_bags)


class FusedEmbeddingCollection(EmbeddingCollection):
    """An `EmbeddingCollection` that updates its tables in the backward pass, and frees their gradients.

    Args:
        tables, device, need_indices: see `EmbeddingCollection`.
        optimizer_type, optimizer_kwargs, location: see `FusedEmbeddingBagCollection`.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        optimizer_type: Optimizer,
        optimizer_kwargs: Mapping[str, Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        location: object = None,
    ) -> None:
        super().__init__(tables, device, need_indices)
        self._optimizer = (optimizer_type, dict(optimizer_kwargs))
        apply_optimizer_in_backward(optimizer_type, self.parameters(), dict(optimizer_kwargs))

    def optimizer_type(self) -> Optimizer:
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        return self._optimizer[1]

    def fused_optimizer(self) -> KeyedOptimizer:
        """Returns the optimizers of the tables, with one parameter group each."""
        return _optimizers(self.embeddings)


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: Optimizer,
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device,
    location: object = None,
) -> nn.Module:
    """Replaces the collections of a model by fused ones on `device`, with the same names and new weights.

    Returns:
        The model; or the fused collection, if `model` is a collection.
    """
    settings = (optimizer_type, optimizer_kwargs)
    if type(model) is EmbeddingBagCollection:
        return FusedEmbeddingBagCollection(model.embedding_bag_configs(), *settings, model.is_weighted(), device)
    if type(model) is EmbeddingCollection:
        return FusedEmbeddingCollection(model.embedding_configs(), *settings, device, model.need_indices())
    for name, child in list(model.named_children()):
        setattr(model, name, fuse_embedding_optimizer(child, *settings, device, location))
    return model


def _optimizers(tables: nn.ModuleDict) -> KeyedOptimizer:
    keyed = []
    for name, table in tables.items():
        weight: Any = table.weight
        for optimizer in weight._in_backward_optimizers:
            keyed.append(KeyedOptimizer({f"{name}.weight": weight}, optimizer.state, optimizer.param_groups))
    return CombinedOptimizer(keyed)
