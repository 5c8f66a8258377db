"""DIN: attention of the candidate over the histories (Zhou et al. 2018, arXiv:1706.06978)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig


class DIN(Ranker):
    """Target attention over histories, then an MLP over all features.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        over_arch: layer widths of the MLP; the last is the number of labels.
        attend: creates the attention module from the width of a history; None: `TargetAttention`.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        attend: Callable[[int], nn.Module] | None = None,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings, attend)
        self.over_arch = settings.mlp(self.input.width, over_arch, logits_of="din.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        outputs_BT: torch.Tensor = self.over_arch(self.input(batch))
        return outputs_BT
