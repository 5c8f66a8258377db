"""DIN: a history is weighed by its likeness to the candidate (Zhou et al. 2018, arXiv:1706.06978)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import check_logits
from rayrec.models.ranker import HistoryInputs, Ranker, RankerInput
from rayrec.modules import MLP, EmbeddingBagConfig


class DIN(Ranker):
    """Target attention over histories, then an MLP over all features.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        over_arch: layer widths of the MLP, the last of them 1, or the number of labels.
        attend: makes what weighs a history of a width; None: `TargetAttention`.
        inputs: fields of `HistoryInputs`.

    Raises:
        ValueError: settings that do not fit together, with the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        attend: Callable[[int], nn.Module] | None = None,
        **inputs: Annotated[Any, HistoryInputs],
    ) -> None:
        given = HistoryInputs(**inputs)
        super().__init__(given)
        check_logits("din", "over_arch", over_arch, given.task_weights)
        self.input = RankerInput(tables, num_dense, given, attend)
        self.over_arch = MLP(
            self.input.width, over_arch, dropout=given.dropout, activation_on_last=False, device=given.device
        )

    def outputs(self, batch: Batch) -> torch.Tensor:
        outputs_BT: torch.Tensor = self.over_arch(self.input(batch))
        return outputs_BT
