"""FinalMLP: two gated MLPs and a bilinear fusion of their outputs (Mao et al. 2023, arXiv:2304.00902)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.gate import ContextGate


class FinalMLP(Ranker):
    """Click probability: logit = b + w_1 · o_1 + w_2 · o_2 + Σ_heads o_1h^T W_h o_2h, where o_1 and o_2 are outputs of
    two MLPs over the features times a `ContextGate`.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        first, second: layer widths of the two MLPs.
        first_context, second_context: features that the gates read, for example those of the user and of the item; of
            a feature that several tables read, `feature@table`. Empty: a learned vector.
        gate: layer widths of the gates' networks, without the last layer; null: no gates.
        heads: parts of the bilinear fusion; they divide the last widths of both MLPs.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        first: Sequence[int] = (64, 64),
        second: Sequence[int] = (64, 64),
        first_context: Sequence[str] = (),
        second_context: Sequence[str] = (),
        gate: Sequence[int] | None = (64,),
        heads: int = 1,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings)
        if not first or not second or first[-1] % heads or second[-1] % heads:
            raise ValueError(f"finalmlp: heads={heads} must divide the last widths of {list(first)} and {list(second)}")
        width, device, self.heads, labels = self.input.width, settings.device, heads, settings.num_labels
        self.streams = nn.ModuleList(settings.mlp(width, layers) for layers in (first, second))
        contexts = [self.input.columns(names, "finalmlp: context") for names in (first_context, second_context)]
        self.gates = nn.ModuleList(
            nn.Identity() if gate is None else ContextGate(width, context, self.input.dim, gate, device)
            for context in contexts
        )
        self.linear = nn.Linear(first[-1] + second[-1], labels, device=device)
        self.bilinear = nn.Parameter(
            torch.empty(heads, first[-1] // heads, labels * second[-1] // heads, device=device)
        )
        nn.init.xavier_normal_(self.bilinear)

    def outputs(self, batch: Batch) -> torch.Tensor:
        x = self.input(batch)
        a, b = (stream(gate(x)) for stream, gate in zip(self.streams, self.gates, strict=True))
        a_HBC, b_BHC = a.unflatten(1, (self.heads, -1)).transpose(0, 1), b.unflatten(1, (self.heads, 1, -1))
        products = torch.bmm(a_HBC, self.bilinear).transpose(0, 1).unflatten(2, (-1, b_BHC.shape[3])) * b_BHC
        outputs_BT: torch.Tensor = self.linear(torch.cat([a, b], dim=1)) + products.sum((1, 3))
        return outputs_BT
