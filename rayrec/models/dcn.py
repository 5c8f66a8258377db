"""DLRM with a cross network in place of dot products (DCN-v2, Wang et al. 2021; the model of MLPerf's DLRM-DCNv2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import Head, check_logits
from rayrec.modules import MLP, CrossNet, EmbeddingBagCollection, EmbeddingBagConfig, LowRankCrossNet


class DCN(nn.Module):
    """Click probability from dense features and embedding bags, all crossed with each other.

    Args:
        tables: embedding tables, of any widths.
        num_dense: N, the number of dense features; 0 is allowed.
        dense_arch: layer widths of the bottom MLP; empty: dense features are crossed as they are.
        over_arch: layer widths of the top MLP, the last of them 1, or the number of labels.
        cross_layers: how often features are crossed.
        cross_rank: rank of the cross matrices; 0 for full matrices.
        dropout: in both MLPs.
        is_weighted: ids carry weights.
        task_weights: of several labels' losses; None for one label.
        label_kinds: "binary" or "number" for each label; None: all binary.
        device: of the dense part; the tables lie on "meta" until they are sharded, unless `tables_device` says
            otherwise.
        seed: of the tables' first weights.

    Raises:
        ValueError: widths that do not fit together, with the setting to change.
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
        is_weighted: bool = False,
        task_weights: Sequence[float] | None = None,
        label_kinds: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        tables_device: torch.device | str | None = "meta",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_logits("dcn", "over_arch", over_arch, task_weights)
        self.head = Head(task_weights, device, label_kinds)
        if cross_rank < 0:
            raise ValueError(f"dcn: cross_rank={cross_rank} must be positive, or 0 for full matrices")
        self.embedding_bags = EmbeddingBagCollection(list(tables), is_weighted, device=tables_device, seed=seed)
        use_mlp = bool(num_dense and dense_arch)
        self.dense_arch = MLP(num_dense, dense_arch, dropout=dropout, device=device) if use_mlp else None
        width = dense_arch[-1] if use_mlp else num_dense
        width += sum(table.embedding_dim * len(table.feature_names) for table in tables)
        self.cross: nn.Module = (
            LowRankCrossNet(width, cross_layers, cross_rank, device=device)
            if cross_rank
            else CrossNet(width, cross_layers, device=device)
        )
        self.over_arch = MLP(width, over_arch, dropout=dropout, activation_on_last=False, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean binary cross-entropy, logits `[B]`, or `[B, T]` of several labels)."""
        pooled = self.embedding_bags(batch.sparse)
        dense = batch.dense if self.dense_arch is None else self.dense_arch(batch.dense)
        features = torch.cat([dense, pooled.values()], dim=1)
        loss_and_logits: tuple[torch.Tensor, torch.Tensor] = self.head(self.over_arch(self.cross(features)), batch)
        return loss_and_logits
