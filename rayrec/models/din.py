"""DIN: attention of the candidate over the histories (Zhou et al. 2018, arXiv:1706.06978)."""

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
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        over_arch: layer widths of the MLP; the last is the number of labels.
        attend: creates the attention module from the width of a history; None: `TargetAttention`.
        inputs: fields of `HistoryInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        attend: Callable[[int], nn.Module] | None = None,
        **inputs: Annotated[Any, HistoryInputs],
    ) -> None:
        settings = HistoryInputs(**inputs)
        super().__init__(settings)
        check_logits("din", "over_arch", over_arch, settings.task_weights)
        self.input = RankerInput(tables, num_dense, settings, attend)
        self.over_arch = MLP(
            self.input.width, over_arch, dropout=settings.dropout, activation_on_last=False, device=settings.device
        )

    def outputs(self, batch: Batch) -> torch.Tensor:
        outputs_BT: torch.Tensor = self.over_arch(self.input(batch))
        return outputs_BT
