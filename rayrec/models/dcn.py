"""DLRM with a cross network instead of dot products (DCN-v2, Wang et al. 2021; MLPerf's DLRM-DCNv2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import CrossNet, EmbeddingBagConfig, LowRankCrossNet


class DCN(Ranker):
    """Click probability from crosses of all dense features and pooled embeddings.

    Args:
        tables: embedding tables of any widths.
        num_dense: N, the number of dense features; may be 0.
        dense_arch: layer widths of the bottom MLP; empty: cross the dense features directly.
        over_arch: layer widths of the top MLP; the last is the number of labels.
        cross_layers: number of cross layers.
        cross_rank: rank of the cross matrices; 0 for full matrices.
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
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings)
        if cross_rank < 0:
            raise ValueError(f"dcn: cross_rank={cross_rank} must be positive, or 0 for full matrices")
        self.embedding_bags = self.input.lookup.release_bags()
        numbers, width = self.input.numbers_width, self.input.width
        self.dense_arch = settings.mlp(numbers, dense_arch) if numbers and dense_arch else None
        if self.dense_arch is not None:
            width += dense_arch[-1] - numbers
        self.cross: nn.Module = (
            LowRankCrossNet(width, cross_layers, cross_rank, device=settings.device)
            if cross_rank
            else CrossNet(width, cross_layers, device=settings.device)
        )
        self.over_arch = settings.mlp(width, over_arch, logits_of="dcn.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        numbers = self.input.numbers(batch)
        dense = numbers if self.dense_arch is None else self.dense_arch(numbers)
        features = torch.cat([dense, self.input.vectors(batch, self.embedding_bags)], dim=1)
        outputs_BT: torch.Tensor = self.over_arch(self.cross(features))
        return outputs_BT
