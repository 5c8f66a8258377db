"""Wukong: stacked factorization machines whose outputs are fields again (Zhang et al. 2024, arXiv:2403.02545)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.crossnet import check_sizes
from rayrec.modules.wukong import WukongLayer


class Wukong(Ranker):
    """Click probability from `WukongLayer`s over the fields, and an MLP over the last layer.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        over_arch: layer widths of the MLP over the last layer; the last is the number of labels.
        layers: number of layers.
        fm_vectors: vectors of each layer that its FMB computes.
        linear_vectors: vectors of each layer that its LCB computes.
        rank: columns of Y.
        fm_hidden: hidden layer widths of the MLP of a FMB.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        over_arch: Sequence[int],
        layers: int = 2,
        fm_vectors: int = 8,
        linear_vectors: int = 8,
        rank: int = 8,
        fm_hidden: Sequence[int] = (64,),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings, fields="wukong")
        check_sizes("wukong", layers=layers, fm_vectors=fm_vectors, linear_vectors=linear_vectors, rank=rank)
        dim, vectors = self.input.dim, fm_vectors + linear_vectors
        self.layers = nn.ModuleList()
        for count in [self.input.num_fields] + [vectors] * (layers - 1):
            mlp = settings.mlp(count * rank, fm_hidden)
            self.layers.append(WukongLayer(count, dim, fm_vectors, linear_vectors, rank, mlp, settings.device))
        self.over_arch = settings.mlp(vectors * dim, over_arch, logits_of="wukong.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        x_BFD = self.input.fields(batch)
        for layer in self.layers:
            x_BFD = layer(x_BFD)
        outputs_BT: torch.Tensor = self.over_arch(x_BFD.flatten(1))
        return outputs_BT
