"""What the models share: checks of their settings, and the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rayrec.modules import EmbeddingBagConfig


def common_dim(model: str, tables: Sequence[EmbeddingBagConfig]) -> int:
    """The tables' one `embedding_dim`.

    Raises:
        ValueError: no tables, or tables of different widths, named.
    """
    dims = {table.name: table.embedding_dim for table in tables}
    if len(set(dims.values())) != 1:
        raise ValueError(f"{model}: all tables need one embedding_dim; there are {dims}")
    return next(iter(dims.values()))


def check_logit(model: str, setting: str, sizes: Sequence[int]) -> None:
    """Raises ValueError where layer widths do not end with the logit."""
    if not sizes or sizes[-1] != 1:
        raise ValueError(f"{model}: {setting}={list(sizes)} must end with 1, the logit")


def mean_loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of logits `[B]`, averaged over the batch; of an empty batch 0, with gradients of 0."""
    if label.numel() == 0:
        return logits.sum()
    return F.binary_cross_entropy_with_logits(logits, label)
