"""GDCN: a cross network with gates (Wang et al. 2023, arXiv:2311.04635)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.crossnet import check_sizes


class GDCN(Ranker):
    """Click probability from gated crosses c_{l+1} = c_0 ⊙ (W_l c_l + b_l) ⊙ sigmoid(G_l c_l) + c_l of the features.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        over_arch: layer widths of the MLP over the crosses; the last is the number of labels.
        cross_layers: number of cross layers.
        deep_arch: layer widths of an MLP over the features, which `over_arch` reads beside the crosses (GDCN-P);
            empty: `over_arch` reads the crosses alone (GDCN-S).
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        cross_layers: int = 3,
        deep_arch: Sequence[int] = (),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        check_sizes("gdcn", cross_layers=cross_layers)
        super().__init__(tables, num_dense, settings)
        width, device = self.input.width, settings.device
        self.crosses = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(cross_layers))
        self.gates = nn.ModuleList(nn.Linear(width, width, bias=False, device=device) for _ in range(cross_layers))
        self.deep = settings.mlp(width, deep_arch) if deep_arch else None
        self.over_arch = settings.mlp(width + sum(deep_arch[-1:]), over_arch, logits_of="gdcn.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        x = crossed = self.input(batch)
        for cross, gate in zip(self.crosses, self.gates, strict=True):
            crossed = x * cross(crossed) * gate(crossed).sigmoid() + crossed
        both = crossed if self.deep is None else torch.cat([crossed, self.deep(x)], dim=1)
        outputs_BT: torch.Tensor = self.over_arch(both)
        return outputs_BT
