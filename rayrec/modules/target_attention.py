"""Attention of a candidate to the positions of a history: DIN, and the transformer of BST."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.activation import LayerStyle
from rayrec.modules.attention import Layout
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.mlp import MLP
from rayrec.modules.pooling import jagged_softmax, pool_sum, row_of
from rayrec.modules.positions import Positions


class TargetAttention(nn.Module):
    """Σ a·k over a row's keys, where a = MLP([q, k, q - k, q * k]) (DIN, Zhou et al. 2018, arXiv:1706.06978).

    Rows are not padded; an empty row gives 0.

    Args:
        dim: D, the width of queries and keys.
        hidden: Layer widths of the MLP, without the last layer of width 1.
        softmax: Normalizes the weights of a row to a sum of 1. The paper does not.
        activation: Activation of the MLP, a name of `activation.ACTIVATIONS`; the paper's is "dice".
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int],
        softmax: bool = False,
        activation: str = "sigmoid",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("target attention: hidden is empty; give the MLP at least one layer")
        self.dim, self.softmax = dim, softmax
        self.first = nn.Linear(4 * dim, hidden[0], device=device)
        self.activation = LayerStyle(activation=activation).module((hidden[0],), device)
        self.rest = MLP(hidden[0], [*hidden[1:], 1], activation=activation, activation_on_last=False, device=device)

    def forward(self, query_BD: torch.Tensor, keys_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """`[B, D]` from queries `[B, D]` and the keys of all rows `[T, D]`, with `lengths_B` keys per row."""
        rows_T = row_of(lengths_B, keys_TD.shape[0])
        # W [q, k, q - k, q * k], with the terms in q alone computed once per row instead of once per key.
        w_q, w_k, w_difference, w_product = self.first.weight.split(self.dim, dim=1)
        query_part_BH = query_BD @ (w_q + w_difference).T + self.first.bias
        key_part_TH = keys_TD @ (w_k - w_difference).T + (query_BD[rows_T] * keys_TD) @ w_product.T
        scores_T = self.rest(self.activation(query_part_BH[rows_T] + key_part_TH)).squeeze(1)
        weights_T = jagged_softmax(scores_T, lengths_B) if self.softmax else scores_T
        return pool_sum(keys_TD, lengths_B, weights_T)


class TargetTransformer(nn.Module):
    """A transformer over a row's keys followed by its query; returns the output at the query (BST, Chen et al. 2019,
    arXiv:1905.06874). Every position attends to the whole row.

    Args:
        config: Config of the encoder. Its width is the width of queries and keys.
        max_length: Maximum number of keys of a row.
    """

    def __init__(self, config: EncoderConfig, max_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.width = max_length + 1
        with torch.device(device or "cpu"):
            self.positions, self.encoder = Positions(self.width, config.dim), TransformerEncoder(config)

    def forward(self, query_BD: torch.Tensor, keys_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """As for `TargetAttention`.

        Raises:
            ValueError: A row has more than `max_length` keys.
        """
        keys, total = keys_TD.shape[0], keys_TD.shape[0] + query_BD.shape[0]
        offsets = F.pad((lengths_B.long() + 1).cumsum(0), (1, 0))
        positions, ends = torch.arange(keys, device=query_BD.device) + row_of(lengths_B, keys), offsets[1:] - 1
        x_TD = query_BD.new_zeros(total, query_BD.shape[1])
        x_TD = x_TD.index_copy(0, positions, keys_TD).index_copy(0, ends, query_BD)
        width = self.width if torch.compiler.is_exporting() else None
        layout = Layout(offsets, total=total, width=width)
        encoded_TD: torch.Tensor = self.encoder(x_TD + self.positions(layout), layout)
        return encoded_TD.index_select(0, ends)
