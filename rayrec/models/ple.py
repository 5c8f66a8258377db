"""Several labels from gated experts: PLE, a task's own beside shared ones in levels, and MMoE, shared ones alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.ranker import HistoryInputs, Ranker, RankerInput
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ExpertSizes, MultiTask


class PLE(Ranker):
    """A level's mixes are the next one's inputs (Tang et al. 2020, RecSys).

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        levels: how many; 1 is CGC.
        own: experts of each task at each level.
        shared: experts of all tasks at each level.
        expert: layer widths of each.
        tower: layer widths of each task's network, without the last one of 1.
        inputs: fields of `HistoryInputs`.

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
        **inputs: Annotated[Any, HistoryInputs],
    ) -> None:
        if levels < 1:
            raise ValueError(f"ple: levels={levels} must be at least 1")
        given = HistoryInputs(**inputs)
        super().__init__(given)
        self.input = RankerInput(tables, num_dense, given)
        level = ExpertSizes(tasks=given.num_labels, own=own, shared=shared, layers=tuple(expert))
        self.tasks = MultiTask(self.input.width, [level] * levels, tower, given.dropout, given.device)

    def outputs(self, batch: Batch) -> torch.Tensor:
        outputs_BT: torch.Tensor = self.tasks(self.input(batch))
        return outputs_BT


def mmoe(
    tables: Sequence[EmbeddingBagConfig],
    num_dense: int,
    experts: int = 4,
    expert: Sequence[int] = (64,),
    tower: Sequence[int] = (32,),
    **inputs: Annotated[Any, HistoryInputs],
) -> PLE:
    """Experts that all tasks share, mixed by a gate a task (Ma et al. 2018, KDD): PLE of one level, without own ones.

    Args:
        tables, num_dense, inputs: as of `PLE`.
        experts: how many; one is a shared bottom.
        expert: layer widths of each.
        tower: layer widths of each task's network, without the last one of 1.
    """
    return PLE(tables, num_dense, levels=1, own=0, shared=experts, expert=expert, tower=tower, **inputs)
