"""BST: a transformer over each history and its candidate (Chen et al. 2019, arXiv:1905.06874)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from rayrec.models.din import DIN
from rayrec.models.ranker import ModelInputs
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
    **inputs: Annotated[Any, ModelInputs],
) -> DIN:
    """DIN with a transformer instead of its attention.

    Args:
        tables, num_dense, inputs: see `DIN`.
        over_arch: layer widths of the MLP; the last is the number of labels.
        max_length: most items in a history; the `length` of its sequence.
        blocks: number of transformer layers.
        heads: attention heads.
        hidden: hidden width of the feed-forward network; null: the width of the history's vectors.
    """
    settings = ModelInputs(**inputs)

    def attend(dim: int) -> TargetTransformer:
        config = EncoderConfig(
            dim=dim, blocks=blocks, heads=heads, hidden=hidden, dropout=settings.dropout, causal=False
        )
        return TargetTransformer(config, max_length, settings.device)

    return DIN(tables, num_dense, over_arch, attend, **inputs)
