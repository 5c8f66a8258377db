"""BST: a history and its candidate through a transformer (Chen et al. 2019, arXiv:1905.06874)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from rayrec.models.din import DIN
from rayrec.models.ranker import HistoryInputs
from rayrec.modules import EmbeddingBagConfig
from rayrec.modules.encoder import EncoderConfig
from rayrec.modules.target_attention import TargetTransformer


def bst(
    tables: Sequence[EmbeddingBagConfig],
    num_dense: int,
    over_arch: Sequence[int],
    max_length: int = 50,
    blocks: int = 1,
    heads: int = 1,
    hidden: int | None = None,
    **inputs: Annotated[Any, HistoryInputs],
) -> DIN:
    """DIN with a transformer in place of its attention.

    Args:
        tables, num_dense, inputs: as of `DIN`.
        over_arch: layer widths of the MLP, the last of them 1, or the number of labels.
        max_length: items of a history at most; the `length` of its sequence.
        blocks: of the transformer.
        heads: of each attention.
        hidden: width between the two layers of each position's network; null: that of the history's vectors.
    """
    given = HistoryInputs(**inputs)

    def attend(dim: int) -> TargetTransformer:
        config = EncoderConfig(dim=dim, blocks=blocks, heads=heads, hidden=hidden, dropout=given.dropout, causal=False)
        return TargetTransformer(config, max_length, given.device)

    return DIN(tables, num_dense, over_arch, attend, **inputs)
