"""ESMM: conversion as click × conversion after click, trained on all rows (Ma et al. 2018, arXiv:1804.07931)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ParallelMLPs


class ESMM(Ranker):
    """Two labels: clicked, and clicked and converted (0 for a row without a click).

    One tower predicts p(click), the other p(conversion | click); the product is p(click and conversion). Both losses
    use all rows, so the model has no bias from training on clicked rows only.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        tower: layer widths of both towers, without the last layer of width 1.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        tower: Sequence[int] = (64, 32),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        if settings.task_weights is None or settings.num_labels != 2 or "number" in (settings.label_kinds or ()):
            raise ValueError("esmm: two binary `labels` are needed, in this order: click, click and conversion")
        super().__init__(tables, num_dense, settings)
        self.towers = ParallelMLPs(
            2, self.input.width, [*tower, 1], logits=True, style=settings.style, device=settings.device
        )

    def outputs(self, batch: Batch) -> torch.Tensor:
        click, conversion = self.towers([self.input(batch)] * 2).squeeze(2).unbind(1)
        return torch.stack([click, logit_of_both(click, conversion)], dim=1)


def logit_of_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the logit of p = σ(x) σ(y), numerically stable: 1/p - 1 = (1 + e^-x) (1 + e^-y) - 1."""
    return -torch.logsumexp(torch.stack([-x, -y, -x - y]), dim=0)
