"""DLRM with TorchRec's submodules, arguments and state names (Naumov et al. 2019, arXiv:1906.00091).

`DLRM_DCN` is the model of MLPerf (Wang et al. 2021, arXiv:2008.13535). Configs use `rayrec.models.DLRM` and `DCN`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.models.interaction import InteractionArch
from rayrec.modules import MLP, EmbeddingBagCollection, LowRankCrossNet
from rayrec.torchrec.models.interaction import InteractionDCNArch, InteractionProjectionArch
from rayrec.torchrec.sparse import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DLRMWrapper",
    "DLRM_Projection",
    "DenseArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "OverArch",
    "SparseArch",
    "choose",
]


def choose(n: int, k: int) -> int:
    """Returns the binomial coefficient; 0 outside its range."""
    return math.comb(n, k) if 0 <= k <= n else 0


class SparseArch(nn.Module):
    """Looks up the pooled vectors of all features, `[B, F, D]`.

    Args:
        embedding_bag_collection: tables with the same embedding_dim D.

    Raises:
        ValueError: no tables, or tables of different widths.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection: nn.Module = embedding_bag_collection
        configs = embedding_bag_collection.embedding_bag_configs()
        dims = {config.name: config.embedding_dim for config in configs}
        if len(set(dims.values())) != 1:
            raise ValueError(f"all tables need the same embedding_dim; they have {dims}")
        self.D = configs[0].embedding_dim
        self._sparse_feature_names = [name for config in configs for name in config.feature_names]
        self.F = len(self._sparse_feature_names)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns `[B, F, D]`, with features in the order of `sparse_feature_names`."""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled.values().reshape(-1, self.F, self.D)

    @property
    def sparse_feature_names(self) -> list[str]:
        return self._sparse_feature_names


class DenseArch(nn.Module):
    """The bottom MLP.

    Args:
        in_features: number of dense features.
        layer_sizes: layer widths; the last is D.
        device: device of the parameters.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.model: nn.Module = MLP(in_features, layer_sizes, device=device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[B, in_features]` to `[B, D]`."""
        out: torch.Tensor = self.model(features)
        return out


class OverArch(nn.Module):
    """The top MLP, with a linear last layer.

    Args:
        in_features: width of the interaction.
        layer_sizes: layer widths, at least two; the last is the number of logits.
        device: device of the parameters.

    Raises:
        ValueError: fewer than two layers.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(f"over_arch_layer_sizes={list(layer_sizes)} must have at least two layers")
        self.model: nn.Module = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[B, in_features]` to `[B, last width]`."""
        out: torch.Tensor = self.model(features)
        return out


class DLRM(nn.Module):
    """Logits from dense features and embedding bags with pairwise dot products.

    Args:
        embedding_bag_collection: tables with the same embedding_dim D.
        dense_in_features: number of dense features.
        dense_arch_layer_sizes: layer widths of the bottom MLP; the last is D.
        over_arch_layer_sizes: layer widths of the top MLP, at least two.
        dense_device: device of all modules except the tables.

    Raises:
        ValueError: no tables, different widths, or a bottom MLP that does not end with D.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )

    def _build(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None,
    ) -> None:
        self.sparse_arch = SparseArch(embedding_bag_collection)
        num, dim = self.sparse_arch.F, self.sparse_arch.D
        if not dense_arch_layer_sizes or dense_arch_layer_sizes[-1] != dim:
            raise ValueError(
                f"dense_arch_layer_sizes={list(dense_arch_layer_sizes)} must end with the embedding_dim {dim}"
            )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch, width = self._interaction(num, dim, dense_device)
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def _interaction(self, num: int, dim: int, device: torch.device | str | None) -> tuple[nn.Module, int]:
        """Returns the interaction layer and its output width."""
        return InteractionArch(num).to(device), dim + choose(num, 2) + num

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns logits `[B, 1]`."""
        embedded_dense = self.dense_arch(dense_features)
        embedded_sparse = self.sparse_arch(sparse_features)
        logits: torch.Tensor = self.over_arch(self.inter_arch(embedded_dense, embedded_sparse))
        return logits

    def compile_dense_path(self, mode: str | None = None) -> None:
        """Compiles the dense modules with `torch.compile`."""
        self.dense_arch.compile(mode=mode)
        self.inter_arch.compile(mode=mode)
        self.over_arch.compile(mode=mode)


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network as interaction.

    Args:
        dcn_num_layers: number of cross layers.
        dcn_low_rank_dim: rank of the cross matrices. See `DLRM` for the other arguments.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._cross = (dcn_num_layers, dcn_low_rank_dim)
        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )

    def _interaction(self, num: int, dim: int, device: torch.device | str | None) -> tuple[nn.Module, int]:
        width = (num + 1) * dim
        layers, rank = self._cross
        return InteractionDCNArch(num, LowRankCrossNet(width, layers, rank, device=device)), width


class DLRM_Projection(DLRM):
    """DLRM with the product of two projections as interaction.

    Args:
        interaction_branch1_layer_sizes, interaction_branch2_layer_sizes: layer widths of the two projections; the last
            width of each is a multiple of D. See `DLRM` for the other arguments.

    Raises:
        ValueError: a last width that is not a multiple of D.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._branches = (tuple(interaction_branch1_layer_sizes), tuple(interaction_branch2_layer_sizes))
        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )

    def _interaction(self, num: int, dim: int, device: torch.device | str | None) -> tuple[nn.Module, int]:
        for number, sizes in enumerate(self._branches, start=1):
            if sizes[-1] % dim:
                raise ValueError(
                    f"interaction_branch{number}_layer_sizes={list(sizes)} must end with a multiple of the "
                    f"embedding_dim {dim}"
                )
        width = (num + 1) * dim
        branches = [DenseArch(width, sizes, device) for sizes in self._branches]
        out_width = dim + math.prod(sizes[-1] // dim for sizes in self._branches)
        return InteractionProjectionArch(num, *branches), out_width


class DLRMTrain(nn.Module):
    """Adds binary cross-entropy to a model that returns logits, for training pipelines.

    Args:
        dlrm_module: called with `batch.dense_features` and `batch.sparse_features`.
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(self, batch: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Returns (loss, (loss, logits `[B]`, labels `[B]`)); the inner tensors are detached."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class DLRMWrapper(DLRM):
    """DLRM with its loss; takes an object with `float_features`, `idlist_features` and `label`."""

    def forward(self, model_input: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Returns logits `[B, 1]`; in training mode the binary cross-entropy, and the logits."""
        logits: torch.Tensor = super().forward(model_input.float_features, model_input.idlist_features)
        if not self.training:
            return logits
        return F.binary_cross_entropy_with_logits(logits.squeeze(), model_input.label), logits
