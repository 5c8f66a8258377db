"""Models of several labels with gated experts: PLE (task-specific and shared experts) and MMoE (shared experts)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.experts import ExpertSizes, MultiTask


class PLE(Ranker):
    """Progressive layered extraction (Tang et al. 2020, RecSys): each level mixes the outputs of the level below.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        levels: number of levels; 1 is CGC.
        own: task-specific experts per task and level.
        shared: shared experts per level.
        expert: layer widths of an expert.
        tower: layer widths of the tower of a task, without the last layer of width 1.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
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
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        if levels < 1:
            raise ValueError(f"ple: levels={levels} must be at least 1")
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings)
        level = ExpertSizes(tasks=settings.num_labels, own=own, shared=shared, layers=tuple(expert))
        self.tasks = MultiTask(self.input.width, [level] * levels, tower, settings.style, settings.device)

    def outputs(self, batch: Batch) -> torch.Tensor:
        outputs_BT: torch.Tensor = self.tasks(self.input(batch))
        return outputs_BT


def mmoe(
    tables: Sequence[EmbeddingBagConfig],
    num_dense: int,
    experts: int = 4,
    expert: Sequence[int] = (64,),
    tower: Sequence[int] = (32,),
    **inputs: Annotated[Any, ModelInputs],
) -> PLE:
    """Shared experts, mixed by one gate per task (Ma et al. 2018, KDD): PLE with one level and shared experts only.

    Args:
        tables, num_dense, inputs: see `PLE`.
        experts: number of experts; 1 is a shared bottom.
        expert: layer widths of an expert.
        tower: layer widths of the tower of a task, without the last layer of width 1.
    """
    return PLE(tables, num_dense, levels=1, own=0, shared=experts, expert=expert, tower=tower, **inputs)
