"""DLRM: pairwise dot products of dense features and embeddings (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.interaction import InteractionArch
from rayrec.models.loss import check_logits, common_dim
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import MLP, EmbeddingBagConfig


class DLRM(Ranker):
    """Click probability from dense features and embedding bags.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        dense_arch: layer widths of the bottom MLP; the last is D.
        over_arch: layer widths of the top MLP; the last is the number of labels.
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
        dropout: float = 0.0,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(settings)
        dim = common_dim("dlrm", tables)
        if num_dense and (not dense_arch or dense_arch[-1] != dim):
            raise ValueError(f"dlrm: dense_arch={list(dense_arch)} must end with the embedding_dim {dim}")
        check_logits("dlrm", "over_arch", over_arch, settings.task_weights)
        num_features = sum(len(table.feature_names) for table in tables)
        self.num_features, self.dim = num_features, dim
        self.embedding_bags = settings.bags(tables)
        self.dense_arch = MLP(num_dense, dense_arch, dropout=dropout, device=settings.device) if num_dense else None
        self.interaction = InteractionArch(num_features)
        width = dim + num_features * (num_features + 1) // 2
        self.over_arch = MLP(width, over_arch, dropout=dropout, activation_on_last=False, device=settings.device)

    def outputs(self, batch: Batch) -> torch.Tensor:
        pooled = self.embedding_bags(batch.sparse)
        if self.dense_arch is not None:
            dense_BD = self.dense_arch(batch.dense)
        else:
            dense_BD = batch.dense.new_zeros(batch.rows, self.dim)
        sparse_BFD = pooled.values().view(-1, self.num_features, self.dim)
        outputs_BT: torch.Tensor = self.over_arch(self.interaction(dense_BD, sparse_BFD))
        return outputs_BT
