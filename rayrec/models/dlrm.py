"""DLRM: pairwise dot products of dense features and embeddings (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.interaction import InteractionArch
from rayrec.models.loss import common_dim
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig


class DLRM(Ranker):
    """Click probability from dense features and embedding bags.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        dense_arch: layer widths of the bottom MLP; the last is D.
        over_arch: layer widths of the top MLP; the last is the number of labels.
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
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        dim = common_dim("dlrm", tables)
        super().__init__(tables, num_dense, settings)
        self.dim, num_vectors = dim, (self.input.width - self.input.numbers_width) // dim
        if num_dense and (not dense_arch or dense_arch[-1] != self.dim):
            raise ValueError(f"dlrm: dense_arch={list(dense_arch)} must end with the embedding_dim {self.dim}")
        self.embedding_bags = self.input.lookup.release_bags()
        self.dense_arch = settings.mlp(self.input.numbers_width, dense_arch) if num_dense else None
        self.interaction = InteractionArch(num_vectors)
        width = self.dim + num_vectors * (num_vectors + 1) // 2
        self.over_arch = settings.mlp(width, over_arch, logits_of="dlrm.over_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        vectors_BFD = self.input.vectors(batch, self.embedding_bags).unflatten(1, (-1, self.dim))
        if self.dense_arch is not None:
            dense_BD = self.dense_arch(self.input.numbers(batch))
        else:
            dense_BD = batch.dense.new_zeros(batch.rows, self.dim)
        outputs_BT: torch.Tensor = self.over_arch(self.interaction(dense_BD, vectors_BFD))
        return outputs_BT
