"""ESMM: conversion trained on all rows, as click times conversion given click (Ma et al. 2018, arXiv:1804.07931)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.ranker import HistoryInputs, Ranker, RankerInput
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ParallelMLPs


class ESMM(Ranker):
    """Two labels: whether a row was clicked, and whether it was clicked and converted, 0 where it was not clicked.

    One tower gives p(click), the other p(conversion given click), their product p(click and conversion). Both losses
    are over all rows, so that nothing is learned from clicked rows alone.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        tower: layer widths of each of the two networks, without the last one of 1.
        inputs: fields of `HistoryInputs`.

    Raises:
        ValueError: settings that do not fit together, with the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        tower: Sequence[int] = (64, 32),
        **inputs: Annotated[Any, HistoryInputs],
    ) -> None:
        given = HistoryInputs(**inputs)
        super().__init__(given)
        if given.task_weights is None or given.num_labels != 2 or "number" in (given.label_kinds or ()):
            raise ValueError("esmm: it needs two binary `labels`: click, and click and conversion, in this order")
        self.input = RankerInput(tables, num_dense, given)
        self.towers = ParallelMLPs(
            2, self.input.width, [*tower, 1], logits=True, dropout=given.dropout, device=given.device
        )

    def outputs(self, batch: Batch) -> torch.Tensor:
        click, given_click = self.towers([self.input(batch)] * 2).squeeze(2).unbind(1)
        return torch.stack([click, logit_of_both(click, given_click)], dim=1)


def logit_of_both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The logit of σ(one) σ(other): 1/p - 1 = (1 + e^-one) (1 + e^-other) - 1, whose log keeps its digits."""
    return -torch.logsumexp(torch.stack([-one, -other, -one - other]), dim=0)
