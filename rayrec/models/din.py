"""DIN: a history is weighed by its likeness to the candidate (Zhou et al. 2018, arXiv:1706.06978)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import Head, check_logits
from rayrec.models.ranker import RankerInput, RankerInputs
from rayrec.modules import MLP, EmbeddingBagConfig


class DIN(nn.Module):
    """Target attention over histories, then an MLP over all features.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        over_arch: layer widths of the MLP, the last of them 1, or the number of labels.
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
        attention: Sequence[dict[str, list[str]]],
        over_arch: Sequence[int],
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
        check_logits("din", "over_arch", over_arch, task_weights)
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
        self.over_arch = MLP(self.input.width, over_arch, dropout=dropout, activation_on_last=False, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits `[B]`, or `[B, T]` of several labels)."""
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.over_arch(self.input(batch)), batch)
        return loss_and_logits
