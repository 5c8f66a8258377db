"""PLE: experts of a task's own beside shared ones, in levels (Tang et al. 2020, RecSys)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import Head
from rayrec.models.ranker import RankerInput, RankerInputs
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ExpertSizes, MultiTask


class PLE(nn.Module):
    """Several labels; a level's mixes are the next one's inputs.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        levels: how many; 1 is CGC.
        own: experts of each task at each level.
        shared: experts of all tasks at each level.
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
        levels: int = 2,
        own: int = 1,
        shared: int = 1,
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
        if levels < 1:
            raise ValueError(f"ple: levels={levels} must be at least 1")
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
        level = ExpertSizes(tasks=num_tasks, own=own, shared=shared, layers=tuple(expert))
        self.tasks = MultiTask(self.input.width, [level] * levels, tower, dropout, device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits `[B]`, or `[B, T]` of several labels)."""
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.tasks(self.input(batch)), batch)
        return loss_and_logits
