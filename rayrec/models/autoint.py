"""AutoInt: self-attention between the fields (Song et al. 2019, arXiv:1810.11921)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.crossnet import check_sizes


class AutoInt(Ranker):
    """Click probability: logit = linear(e_1 … e_F) of the outputs e of attention layers over the fields.

    Fields are the pooled vectors, attended histories and vectors of numbers. The paper's AutoInt+ adds `deep_arch`.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        layers: number of attention layers.
        heads: attention heads.
        head_dim: width of each head; the output of a layer has `heads` times this width.
        deep_arch: layer widths of an MLP over the fields, whose output is added; the last is the number of labels.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        layers: int = 2,
        heads: int = 2,
        head_dim: int = 16,
        deep_arch: Sequence[int] = (),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings, fields="autoint")
        check_sizes("autoint", layers=layers, heads=heads, head_dim=head_dim)
        self.heads, width = heads, heads * head_dim
        widths = [self.input.dim] + [width] * (layers - 1)
        # queries, keys, values and the residual of each layer
        self.layers = nn.ModuleList(nn.Linear(w, 4 * width, bias=False, device=settings.device) for w in widths)
        self.logits = nn.Linear(self.input.num_fields * width, settings.num_labels, device=settings.device)
        self.deep = settings.mlp(self.input.width, deep_arch, logits_of="autoint.deep_arch") if deep_arch else None

    def outputs(self, batch: Batch) -> torch.Tensor:
        x_BFD = fields_BFD = self.input.fields(batch)
        for layer in self.layers:
            *q_k_v, residual = layer(x_BFD).chunk(4, dim=2)
            q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in q_k_v)
            attended = (q @ k.transpose(2, 3)).softmax(3) @ v
            x_BFD = torch.relu(attended.transpose(1, 2).flatten(2) + residual)
        outputs_BT: torch.Tensor = self.logits(x_BFD.flatten(1))
        return outputs_BT if self.deep is None else outputs_BT + self.deep(fields_BFD.flatten(1))
