"""MMoE: experts that all tasks share, mixed by a gate a task (Ma et al. 2018, KDD)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import Head
from rayrec.models.ranker import RankerInput, RankerInputs
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ExpertSizes, MultiTask


class MMoE(nn.Module):
    """Several labels from shared experts. One expert is a shared bottom.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        experts: how many.
        expert: layer widths of each.
        tower: layer widths of each task's network, without the last one of 1.
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
        experts: int = 4,
        expert: Sequence[int] = (64,),
        tower: Sequence[int] = (32,),
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
        self.head = Head(task_weights, device, label_kinds)
        num_tasks = 1 if task_weights is None else len(task_weights)
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
        level = ExpertSizes(tasks=num_tasks, own=0, shared=experts, layers=tuple(expert))
        self.tasks = MultiTask(self.input.width, [level], tower, dropout, device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits `[B]`, or `[B, T]` of several labels)."""
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.tasks(self.input(batch)), batch)
        return loss_and_logits
