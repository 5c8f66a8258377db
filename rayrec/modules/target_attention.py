"""Which positions of a history matter for a candidate: the attention of DIN, and the transformer of BST."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.attention import Layout
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.mlp import MLP, NAMED
from rayrec.modules.pooling import jagged_softmax, pool_sum, row_of
from rayrec.modules.positions import Positions


class TargetAttention(nn.Module):
    """Σ a·k over a row's keys, where a = MLP([q, k, q - k, q * k]) (DIN, Zhou et al. 2018, arXiv:1706.06978).

    Nothing is padded; an empty row gives 0.

    The paper's Dice activation normalizes by the statistics of a batch, so that it is another function on another
    number of ranks; the layers here take ReLU, sigmoid, or swish with layer normalization.

    Args:
        dim: D, the width of queries and keys.
        hidden: layer widths of the MLP, without the last one of 1.
        softmax: weights of a row add up to 1; the paper leaves them as they are.
        activation: of the MLP: "relu", "sigmoid" or "swish_layernorm".
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
        if activation not in NAMED:
            raise ValueError(f"target attention: no activation {activation!r}; there are {', '.join(NAMED)}")
        self.activation = NAMED[activation](hidden[0], device)
        self.rest = MLP(hidden[0], [*hidden[1:], 1], activation=activation, activation_on_last=False, device=device)

    def forward(self, query_BD: torch.Tensor, keys_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """`[B, D]` from queries `[B, D]` and the keys of all rows `[T, D]`, of which each row has `lengths_B`."""
        rows_T = row_of(lengths_B, keys_TD.shape[0])
        # W [q, k, q - k, q * k], the part of q once a row instead of once a key
        of_q, of_k, of_difference, of_product = self.first.weight.split(self.dim, dim=1)
        query_part_BH = query_BD @ (of_q + of_difference).T + self.first.bias
        key_part_TH = keys_TD @ (of_k - of_difference).T + (query_BD[rows_T] * keys_TD) @ of_product.T
        scores_T = self.rest(self.activation(query_part_BH[rows_T] + key_part_TH)).squeeze(1)
        weights_T = jagged_softmax(scores_T, lengths_B) if self.softmax else scores_T
        return pool_sum(keys_TD, lengths_B, weights_T)


class TargetTransformer(nn.Module):
    """A row's keys and then its query through a transformer; what comes out at the query (BST, Chen et al. 2019,
    arXiv:1905.06874). Every position sees all of its row.

    Args:
        config: of the encoder; its width is that of queries and keys.
        max_length: keys of a row at most.
    """

    def __init__(self, config: EncoderConfig, max_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.width = max_length + 1
        with torch.device(device or "cpu"):
            self.positions, self.encoder = Positions(self.width, config.dim), TransformerEncoder(config)

    def forward(self, query_BD: torch.Tensor, keys_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """As of `TargetAttention`.

        Raises:
            ValueError: a row has more than `max_length` keys.
        """
        keys, total = keys_TD.shape[0], keys_TD.shape[0] + query_BD.shape[0]
        offsets = F.pad((lengths_B.long() + 1).cumsum(0), (1, 0))
        places, ends = torch.arange(keys, device=query_BD.device) + row_of(lengths_B, keys), offsets[1:] - 1
        x_TD = query_BD.new_zeros(total, query_BD.shape[1])
        x_TD = x_TD.index_copy(0, places, keys_TD).index_copy(0, ends, query_BD)
        width = self.width if torch.compiler.is_exporting() else None
        layout = Layout(offsets, total=total, width=width)
        encoded_TD: torch.Tensor = self.encoder(x_TD + self.positions(layout), layout)
        return encoded_TD.index_select(0, ends)
