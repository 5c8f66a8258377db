"""ESMM: conversion trained on all rows, as click times conversion given click (Ma et al. 2018, arXiv:1804.07931)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import Head
from rayrec.models.ranker import RankerInput, RankerInputs
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ParallelMLPs


class ESMM(nn.Module):
    """Two labels: whether a row was clicked, and whether it was clicked and converted, 0 where it was not clicked.

    One tower gives p(click), the other p(conversion given click), their product p(click and conversion). Both losses
    are over all rows, so that nothing is learned from clicked rows alone.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        tower: layer widths of each of the two networks, without the last one of 1.
        attention: histories that are weighed by their likeness to the candidate, each `{history: [features], target:
            [features]}`; other lists are pooled.
        attention_hidden: layer widths of each attention's network, without the last one of 1.
        softmax: the weights of a history add up to 1; DIN leaves them as they are.
        dropout: in all layers but those of the attention.
        is_weighted: ids carry weights.
        task_weights: of several labels' losses; None for one label.
        label_kinds: "binary" or "number" for each label; None: all binary.
        device: of the dense part; the tables lie on "meta" until they are sharded, unless `tables_device` says
            otherwise.
        seed: of the tables' first weights.

    Raises:
        ValueError: settings that do not fit together, with the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        tower: Sequence[int] = (64, 32),
        attention: Sequence[dict[str, list[str]]] = (),
        attention_hidden: Sequence[int] = (64, 16),
        softmax: bool = False,
        dropout: float = 0.0,
        is_weighted: bool = False,
        task_weights: Sequence[float] | None = None,
        label_kinds: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        tables_device: torch.device | str | None = "meta",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if task_weights is None or len(task_weights) != 2 or "number" in (label_kinds or ()):
            raise ValueError("esmm: it needs two binary `labels`: click, and click and conversion, in this order")
        self.head = Head(task_weights, device, label_kinds)
        inputs = RankerInputs(
            attention=attention,
            hidden=attention_hidden,
            softmax=softmax,
            is_weighted=is_weighted,
            device=device,
            tables_device=tables_device,
            seed=seed,
        )
        self.input = RankerInput(tables, num_dense, inputs)
        self.towers = ParallelMLPs(2, self.input.width, [*tower, 1], logits=True, dropout=dropout, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits `[B, 2]` of click, and of click and conversion)."""
        click, given_click = self.towers(self.input(batch).expand(2, -1, -1)).squeeze(2)
        logits_BT = torch.stack([click, logit_of_both(click, given_click)], dim=1)
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(logits_BT, batch)
        return loss_and_logits


def logit_of_both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The logit of σ(one) σ(other): 1/p - 1 = (1 + e^-one) (1 + e^-other) - 1, whose log keeps its digits."""
    return -torch.logsumexp(torch.stack([-one, -other, -one - other]), dim=0)
