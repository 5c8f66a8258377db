"""DLRM with a cross network instead of dot products (DCN-v2, Wang et al. 2021; MLPerf's DLRM-DCNv2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import check_logits
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import MLP, CrossNet, EmbeddingBagConfig, LowRankCrossNet


class DCN(Ranker):
    """Click probability from crosses of all dense features and pooled embeddings.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        dense_arch: layer widths of the bottom MLP; empty: cross the dense features directly.
        over_arch: layer widths of the top MLP; the last is the number of labels.
        cross_layers: number of cross layers.
        cross_rank: rank of the cross matrices; 0 for full matrices.
        dropout: dropout of both MLPs.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the widths do not match; names the setting to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        dense_arch: Sequence[int],
        over_arch: Sequence[int],
        cross_layers: int = 3,
        cross_rank: int = 64,
        dropout: float = 0.0,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(settings)
        check_logits("dcn", "over_arch", over_arch, settings.task_weights)
        if cross_rank < 0:
            raise ValueError(f"dcn: cross_rank={cross_rank} must be positive, or 0 for full matrices")
        self.embedding_bags = settings.bags(tables)
        use_mlp = bool(num_dense and dense_arch)
        self.dense_arch = MLP(num_dense, dense_arch, dropout=dropout, device=settings.device) if use_mlp else None
        width = dense_arch[-1] if use_mlp else num_dense
        width += sum(table.embedding_dim * len(table.feature_names) for table in tables)
        self.cross: nn.Module = (
            LowRankCrossNet(width, cross_layers, cross_rank, device=settings.device)
            if cross_rank
            else CrossNet(width, cross_layers, device=settings.device)
        )
        self.over_arch = MLP(width, over_arch, dropout=dropout, activation_on_last=False, device=settings.device)

    def outputs(self, batch: Batch) -> torch.Tensor:
        dense = batch.dense if self.dense_arch is None else self.dense_arch(batch.dense)
        features = torch.cat([dense, self.embedding_bags(batch.sparse).values()], dim=1)
        outputs_BT: torch.Tensor = self.over_arch(self.cross(features))
        return outputs_BT
